"""Every command refuses hostile input in one message. The cases come from click's own lists."""

from pathlib import Path

import click
import pytest

from tests.hostile.cases import COMMANDS, GOOD, Hostile, cases, kind_of, parameters
from tests.hostile.driver_client import Answer, Driver
from tests.hostile.judge import complaints
from tests.hostile.place import HostilePlace


def test_every_command_and_parameter_has_cases() -> None:
    assert set(GOOD) == set(COMMANDS)
    for command, parameter in parameters():
        kind_of(command, parameter)


def test_every_number_has_bounds() -> None:
    for command, parameter in parameters():
        kinds = getattr(parameter.type, "types", [parameter.type])
        for kind in kinds:
            if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
                assert isinstance(kind, click.IntRange | click.FloatRange), (command, parameter)
                assert None not in (kind.min, kind.max), (command, parameter)


@pytest.mark.parametrize("command", sorted(GOOD))
def test_hostile_input_is_refused(
    command: str, place: HostilePlace, driver: Driver, shim: Path | None
) -> None:
    wrong, num_cases = [], 0
    for case in cases(place, command):
        if case.fault and not shim:
            continue
        answer = driver.ask(*case.args, fault=case.fault, **case.request)
        wrong += [f"{case.what}: {said}" for said in complaints(case, answer, place.changed())]
        num_cases += 1
    assert num_cases > 10
    assert not wrong, f"{len(wrong)} of {num_cases}:\n" + "\n".join(wrong)


CASE = Hostile("a case", ("runs",), "nowhere/file", "--runs-dir")
REFUSED = Answer(2, "error: nowhere/file does not exist\n", 0.0)


@pytest.mark.parametrize(
    ("answer", "changed", "said"),
    [
        (REFUSED, [], None),
        (REFUSED, ["/here/runs"], "it changes /here/runs"),
        (Answer(0, "", 0.0), [], "it is accepted"),
        (Answer(0, "", 0.0, started=True), [], "something begins"),
        (Answer(3, REFUSED.output, 0.0), [], "it exits with 3"),
        (Answer(1, REFUSED.output * 2, 0.0), [], "not one message"),
        (Answer(2, "error: it is wrong", 0.0), [], "does not say where"),
        (Answer(1, "", 0.0, trace="KeyError"), [], "a traceback: KeyError"),
        (Answer(None, "", 9.0, hung=True), [], "it hangs"),
    ],
)
def test_judge_detects_bad_answers(answer: Answer, changed: list[str], said: str | None) -> None:
    found = list(complaints(CASE, answer, changed))
    assert said is None if not found else said and said in found[0]
