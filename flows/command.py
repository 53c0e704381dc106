"""A command's end in the terminal: errors that a person can mend in a line, with an exit code."""

import sys
from collections.abc import Callable

import click

from engines.durable import is_disk_full
from flows.ending import INTERRUPTED, UNREAD, ended_by_signals, flush_output, nobody_reads


def run_command(command: Callable[[], None]) -> None:
    try:
        with ended_by_signals():
            command()
    except (ValueError, RuntimeError) as error:
        click.secho(f"error: {error}", fg="red", err=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and nobody_reads():
            sys.exit(UNREAD)
        if not is_disk_full(error):
            raise
        click.secho(f"error: {error}", fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.secho("interrupted; a run goes on with --resume", fg="yellow", err=True)
        sys.exit(INTERRUPTED)
    finally:
        flush_output()
