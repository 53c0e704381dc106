"""Run a command in the terminal, and report errors that the user can fix in one message."""

import sys
from collections.abc import Callable
from io import TextIOWrapper

import click

from refrain.engines.paths import explain, is_given
from refrain.flows.signals import INTERRUPTED, UNREAD, ended_by_signals, flush_output, nobody_reads


def run_command(command: Callable[[], None]) -> None:
    """Run a command. Exit with 2 after bad input and with 1 after a failure of the machine, each
    with one message. Bugs keep their traceback."""
    if isinstance(sys.stdout, TextIOWrapper):
        # The bytes of a file's name may not be valid text.
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
        _fail(f"out of memory: free some, or read less data ({error})", 1)
    except KeyboardInterrupt:
        click.secho("interrupted; continue a run with --resume", fg="yellow", err=True)
        sys.exit(INTERRUPTED)
    finally:
        flush_output()


def _fail(message: str, status: int) -> None:
    click.secho(f"error: {message}", fg="red", err=True)
    sys.exit(status)
