"""The checks find each fault of a made-up run, and none in a good run."""

from typing import Any

import pytest

from refrain.benchmarks.chaos.checks import (
    COMPLETE,
    RecordedSample,
    RunTraces,
    SampleKey,
    complaints,
)

NUM_STEPS = 3


def sample(origin: int, prompt: str, index: int, **values: Any) -> RecordedSample:
    given = {
        "key": SampleKey("train", origin, prompt, index),
        "step": origin,
        "token_ids": (origin, ord(prompt), index),
        "finish_reason": "stop",
        "versions": (origin - 1,),
        "rewarded": True,
    }
    return RecordedSample(**given | values)


SAMPLES = tuple(
    sample(step, prompt, index)
    for step in range(1, NUM_STEPS + 1)
    for prompt in "ab"
    for index in range(2)
)


def record(**values: Any) -> RunTraces:
    given = {
        "num_steps": NUM_STEPS,
        "samples": SAMPLES,
        "planned": frozenset(one.key for one in SAMPLES),
        "steps": (1, 2, 3),
        "summary_steps": NUM_STEPS,
        "mlflow_status": "FINISHED",
        "mlflow_steps": dict.fromkeys(COMPLETE, (1, 2, 3)),
    }
    return RunTraces(**given | values)


def with_sample(number: int, **values: Any) -> tuple[RecordedSample, ...]:
    return (
        *SAMPLES[:number],
        SAMPLES[number].model_copy(update=values),
        *SAMPLES[number + 1 :],
    )


def test_a_good_run_has_no_complaints() -> None:
    assert complaints(record(), record()) == []


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"samples": (*SAMPLES, SAMPLES[5])}, "1 samples in the store twice: train step 2 a/1"),
        # A deferred sample that was generated in its own step as well.
        (
            {"samples": (*SAMPLES, sample(1, "a", 0, step=2))},
            "in the store twice: train step 1 a/0",
        ),
        ({"samples": SAMPLES[:-1]}, "planned and not in the store: train step 3 b/1"),
        ({"samples": (*SAMPLES, sample(3, "c", 0))}, "not planned: train step 3 c/0"),
        ({"samples": with_sample(2, rewarded=False)}, "without a reward: train step 1 b/0"),
        ({"steps": (1, 3)}, "steps reported: (1, 3), not (1, 2, 3)"),
        ({"steps": (1, 2)}, "steps reported: (1, 2)"),
        ({"planned": frozenset()}, "step 2 has no plan"),
        ({"samples": with_sample(0, token_ids=(7,))}, "other tokens than in the undisturbed run"),
        ({"samples": with_sample(11, finish_reason="length")}, "other tokens"),
        ({"summary_steps": None}, "summary of None steps, not of 3"),
        ({"missing": ("2 of MLflow",)}, "missing by the summary: 2 of MLflow"),
        ({"mlflow_status": "RUNNING"}, "MLflow has the run as RUNNING"),
        (
            {"mlflow_steps": dict.fromkeys(COMPLETE, (1, 3))},
            "MLflow has critic/score/mean of steps (1, 3), not (1, 2, 3)",
        ),
        ({"processes": ("12 ray::Store",)}, "left running: 12 ray::Store"),
        ({"files": ("/dev/shm/weights",)}, "left lying: /dev/shm/weights"),
    ],
)
def test_checks_find_each_fault(values: dict[str, Any], complaint: str) -> None:
    found = complaints(record(**values), record())
    assert any(complaint in one for one in found), found


def test_versions_that_learnt_from_other_samples_are_not_compared() -> None:
    """A sample came a step later, so version 1 learned from other samples and is another policy.
    Its samples may differ. Those of version 0 must not."""
    late = sample(1, "a", 0, step=2, versions=(0, 1))
    others = [
        one.model_copy(update={"token_ids": (9,)}) if one.versions != (0,) else one
        for one in SAMPLES[1:]
    ]
    assert complaints(record(samples=(late, *others)), record()) == []
    others[0] = others[0].model_copy(update={"token_ids": (9,)})
    (found,) = complaints(record(samples=(late, *others)), record())
    assert "1 samples with other tokens than in the undisturbed run: train step 1 a/1" in found
