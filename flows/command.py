"""A command's end in the terminal: errors that a person can mend in a line, with an exit code."""

import sys
from collections.abc import Callable

import click

from engines.durable import is_disk_full


def run_command(command: Callable[[], None]) -> None:
    try:
        command()
    except (ValueError, RuntimeError) as error:
        click.secho(f"error: {error}", fg="red", err=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except OSError as error:
        if not is_disk_full(error):
            raise
        click.secho(f"error: {error}", fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.secho("interrupted; a run goes on with --resume", fg="yellow", err=True)
        sys.exit(130)
