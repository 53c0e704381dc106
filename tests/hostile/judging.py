"""What is wrong with a command's answer to hostile input."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.hostile.cases import Hostile
from tests.hostile.driving import Answer

MESSAGE = re.compile(r"^(?:error|Error): ", re.MULTILINE)
SERVICES = "/.prefect"
"""Ends of directories of services, which are begun once all has been checked."""


def complaints(case: Hostile, answer: Answer, changed: Sequence[str]) -> Iterator[str]:
    """None when the command refuses its input in a sentence and leaves everything as it was."""
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
    """Words by which a message says which input it is about."""
    name = Path(case.value).name or case.value
    yield from (name[:40], repr(name)[1:-1], ascii(name)[1:-1], Path(name).stem or name)
    yield case.option
    if case.fault:
        # The first of what is written.
        yield from (Path(case.fault[0]).name, "runs", "pictures")
