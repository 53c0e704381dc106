"""Other programs, asked with a bound on the wait."""

import subprocess
from collections.abc import Sequence
from contextlib import suppress


class Unanswered(RuntimeError):
    """A program did not answer in time."""


def ask(command: Sequence[str], timeout_s: float) -> str:
    """Standard output. Raises OSError when there is no such program, `Unanswered` when it does not
    answer in time, and `CalledProcessError` when it fails."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        process.kill()
        # Who waits in the kernel for a broken driver does not end of it, and is not waited for.
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        raise Unanswered(f"{command[0]} did not answer within {timeout_s:g} s") from error
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output
