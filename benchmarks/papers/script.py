"""Requests of consecutive steps of a trace, and what is known when each is planned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from refrain.engines.simulate.cluster import step_requests
from refrain.engines.simulate.lengths import TraceLengths
from refrain.engines.simulate.trace import Trace
from refrain.schemas.rollout import LengthHistory, RequestId, RolloutRequest


@dataclass(frozen=True, slots=True)
class StepScript:
    """One step."""

    step: int
    epoch: int
    requests: Mapping[str, Sequence[RolloutRequest]]
    """Requests by prompt, in the order of the trace."""
    history: Mapping[str, LengthHistory]
    """Lengths of its prompts that were known when it was planned."""

    @property
    def group_size(self) -> int:
        return max(len(group) for group in self.requests.values())

    @property
    def num_rollouts(self) -> int:
        return sum(len(group) for group in self.requests.values())


@dataclass(frozen=True, slots=True)
class Script:
    """Consecutive steps."""

    steps: tuple[StepScript, ...]
    lengths: Mapping[RequestId, int]
    """Response tokens of every rollout."""


def read_script(trace: Trace, steps: Sequence[int]) -> Script:
    """Read consecutive steps. Raise ValueError if one is missing.

    A run plans a step during the rollouts of the step before, so it knows older steps only.
    """
    if list(steps) != list(range(steps[0], steps[0] + len(steps))):
        raise ValueError(f"steps {list(steps)} do not follow each other: overlapping needs a row")
    known = TraceLengths(trace)
    scripts, lengths = [], {}
    for step in steps:
        rows = trace.step(step)
        requests, of_step = step_requests(rows, step)
        epoch = int(rows.column("epoch")[0])
        scripts.append(StepScript(step, epoch, requests, known.before(step - 1, requests)))
        lengths |= of_step
    return Script(tuple(scripts), lengths)
