"""Judge the answer of a command to hostile input."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.hostile.cases import Hostile
from tests.hostile.driver_client import Answer

MESSAGE = re.compile(r"^(?:error|Error): ", re.MULTILINE)
SERVICES = "/.prefect"
"""Part of the paths of services' directories. A command creates them after all its checks."""


def complaints(case: Hostile, answer: Answer, changed: Sequence[str]) -> Iterator[str]:
    """Yield nothing if the command refuses its input in one message and changes no file. Otherwise
    yield what is wrong."""
    if answer.hung:
        yield f"it hangs: {answer.output}"
    elif answer.trace:
        yield f"a traceback: {answer.trace}"
    elif answer.code == 0:
        if not case.may_pass:
            yield "it is accepted" + (", and something begins" if answer.started else "")
        return
    else:
        yield from _about_message(case, answer)
    if unexpected := [path for path in changed if not (case.fault and SERVICES in path)]:
        yield f"it changes {', '.join(unexpected[:3])}"


def _about_message(case: Hostile, answer: Answer) -> Iterator[str]:
    if answer.code not in (1, 2):
        yield f"it exits with {answer.code}"
    if len(MESSAGE.findall(answer.output)) != 1:
        yield f"not one message: {answer.output}"
    elif not (case.may_pass or any(name in answer.output for name in _names(case))):
        yield f"its message does not say where: {answer.output}"


def _names(case: Hostile) -> Iterable[str]:
    """Yield the words with which a message may name the bad input."""
    name = Path(case.value).name or case.value
    yield from (name[:40], repr(name)[1:-1], ascii(name)[1:-1], Path(name).stem or name)
    yield case.option
    if case.fault:
        # A message may name the first directory that the command writes.
        yield from (Path(case.fault[0]).name, "runs", "pictures")
