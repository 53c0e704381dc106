"""A command's end in the terminal: errors that a person can mend in a line, with an exit code."""

import sys
from collections.abc import Callable
from io import TextIOWrapper

import click

from engines.paths import explain, is_given
from flows.ending import INTERRUPTED, UNREAD, ended_by_signals, flush_output, nobody_reads


def run_command(command: Callable[[], None]) -> None:
    """Run a command. It exits with 2 after bad input, with 1 after what the machine did, each with
    one message; an error of ours keeps its traceback."""
    if isinstance(sys.stdout, TextIOWrapper):
        # The name of a file need not be text.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with ended_by_signals():
            command()
        sys.stdout.flush()
    except (ValueError, RuntimeError) as error:
        _fail(str(error), 2 if isinstance(error, ValueError) else 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and nobody_reads():
            sys.exit(UNREAD)
        _fail(explain(error), 2 if is_given(error) else 1)
    except MemoryError as error:
        _fail(f"too little memory: free some, or give less to read ({error})", 1)
    except KeyboardInterrupt:
        click.secho("interrupted; a run goes on with --resume", fg="yellow", err=True)
        sys.exit(INTERRUPTED)
    finally:
        flush_output()


def _fail(message: str, status: int) -> None:
    click.secho(f"error: {message}", fg="red", err=True)
    sys.exit(status)
