"""Run other programs with a time limit."""

import subprocess
from collections.abc import Sequence
from contextlib import suppress


class CommandTimeout(RuntimeError):
    """A program did not answer in time."""


def ask(command: Sequence[str], timeout_s: float) -> str:
    """Run a command and return its standard output.

    Raise OSError when the program does not exist, `CommandTimeout` when it takes longer than
    `timeout_s`, and `CalledProcessError` when it fails.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        process.kill()
        # A process that waits in the kernel for a broken driver survives the kill. Do not wait.
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        raise CommandTimeout(f"{command[0]} did not answer within {timeout_s:g} s") from error
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output
