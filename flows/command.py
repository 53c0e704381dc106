"""Run a command in the terminal, and report errors that the user can fix in one message."""

import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

import click

from refrain.engines.paths import explain, is_given
from refrain.flows.signals import INTERRUPTED, UNREAD, ended_by_signals, flush_output, nobody_reads
from refrain.schemas.version import OldNameWarning


def run_command(command: Callable[[], None]) -> None:
    """Run a command. Exit with 2 after bad input and with 1 after a failure of the machine, each
    with one message. Bugs keep their traceback."""
    if isinstance(sys.stdout, TextIOWrapper):
        # The bytes of a file's name may not be valid text.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with ended_by_signals(), old_names_shown():
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


@contextmanager
def old_names_shown() -> Generator[None]:
    """Print a line for each old name in a config, without the place in the code that warned."""
    default = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, OldNameWarning):
            click.secho(f"warning: {message}", fg="yellow", err=True)
        else:
            default(message, category, *where, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("once", OldNameWarning)
        warnings.showwarning = show  # ty: ignore[invalid-assignment]
        yield


def _fail(message: str, status: int) -> None:
    click.secho(f"error: {message}", fg="red", err=True)
    sys.exit(status)
