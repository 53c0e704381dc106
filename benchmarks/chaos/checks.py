"""Check a run with faults against its plan, and against an undisturbed run of the same config.
Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from refrain.schemas.base import Frozen

MAX_SHOWN = 3


class SampleKey(NamedTuple):
    split: str
    origin_step: int
    """Step whose plan drew it."""
    prompt_key: str
    sample_index: int


class RecordedSample(Frozen):
    """A row of a run's store."""

    key: SampleKey
    step: int
    """Step that trains on it."""
    token_ids: tuple[int, ...]
    finish_reason: str
    versions: tuple[int, ...]
    """Policy versions of its spans."""
    rewarded: bool


class RunTraces(Frozen):
    """Everything that a run has left behind."""

    num_steps: int
    """Steps of its config."""
    samples: tuple[RecordedSample, ...]
    planned: frozenset[SampleKey]
    steps: tuple[int, ...]
    """Steps with a report in its store."""
    summary_steps: int | None
    """Steps in its summary. None without a summary."""
    missing: tuple[str, ...] = ()
    """Records that MLflow and Prefect lack according to its summary."""
    mlflow_status: str | None
    mlflow_steps: Mapping[str, tuple[int, ...]]
    """Steps of each metric in MLflow."""
    processes: tuple[str, ...] = ()
    """Processes of the run that still run after its end."""
    files: tuple[str, ...] = ()
    """Files that it left outside its directory."""


def complaints(run: RunTraces, undisturbed: RunTraces) -> list[str]:
    """Return a sentence for everything that is lost, duplicated, changed or left behind. Empty for
    a correct run."""
    return [
        *_samples(run),
        *_steps(run),
        *_accounts(run, undisturbed),
        *_tokens(run, undisturbed),
        *(f"left running: {process}" for process in run.processes),
        *(f"left lying: {file}" for file in run.files),
    ]


def _samples(run: RunTraces) -> Iterator[str]:
    times = Counter(sample.key for sample in run.samples)
    yield from _some("in the store twice", [key for key, num in times.items() if num > 1])
    yield from _some("planned and not in the store", run.planned - times.keys())
    yield from _some("in the store and not planned", times.keys() - run.planned)
    unscored = [sample.key for sample in run.samples if not sample.rewarded]
    yield from _some("without a reward", unscored)


def _steps(run: RunTraces) -> Iterator[str]:
    every = tuple(range(1, run.num_steps + 1))
    if run.steps != every:
        yield f"steps reported: {run.steps}, not {every}"
    planned = {key.origin_step for key in run.planned if key.split == "train"}
    yield from (f"step {step} has no plan" for step in every if step not in planned)


def _accounts(run: RunTraces, undisturbed: RunTraces) -> Iterator[str]:
    if run.summary_steps != run.num_steps:
        yield f"summary of {run.summary_steps} steps, not of {run.num_steps}"
    yield from (f"missing by the summary: {record}" for record in run.missing)
    if run.mlflow_status != "FINISHED":
        yield f"MLflow has the run as {run.mlflow_status}"
    for name, steps in undisturbed.mlflow_steps.items():
        # Some metrics, such as saved seconds and drafts, do not exist in every run.
        if name in COMPLETE and set(run.mlflow_steps.get(name, ())) != set(steps):
            yield f"MLflow has {name} of steps {run.mlflow_steps.get(name, ())}, not {steps}"


COMPLETE = ("critic/score/mean", "response_length/mean", "timing_s/gen", "validation/reward")
"""Metrics that every run has."""


def _tokens(run: RunTraces, undisturbed: RunTraces) -> Iterator[str]:
    """Compare the tokens of samples that the same policy versions generated.

    A version is the same in both runs if it has learnt from the same samples. In a pipelined run,
    timing decides which sample is deferred to the next step. Versions differ from there on.
    """
    same = _same_versions(run, undisturbed)
    before = {sample.key: sample for sample in undisturbed.samples}
    changed = [
        sample.key
        for sample in run.samples
        if (other := before.get(sample.key))
        and sample.versions == other.versions
        and max(sample.versions) <= same
        and _text(sample) != _text(other)
    ]
    yield from _some("with other tokens than in the undisturbed run", changed)


def _same_versions(run: RunTraces, undisturbed: RunTraces) -> int:
    """Return the last policy version up to which both runs trained on the same samples."""
    for step in range(1, run.num_steps + 1):
        if _trained_on(run, step) != _trained_on(undisturbed, step):
            return step - 1
    return run.num_steps


def _trained_on(run: RunTraces, step: int) -> dict[SampleKey, tuple[int, ...]]:
    return {
        sample.key: sample.versions
        for sample in run.samples
        if sample.step == step and sample.key.split == "train"
    }


def _text(sample: RecordedSample) -> tuple[tuple[int, ...], str]:
    return sample.token_ids, sample.finish_reason


def _some(
    what: str, keys: Sequence[SampleKey] | frozenset[SampleKey] | set[SampleKey]
) -> list[str]:
    if not keys:
        return []
    shown = [
        f"{key.split} step {key.origin_step} {key.prompt_key[:8]}/{key.sample_index}"
        for key in sorted(keys)[:MAX_SHOWN]
    ]
    return [f"{len(keys)} samples {what}: {', '.join(shown)}"]
