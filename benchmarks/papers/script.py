"""Requests of consecutive steps of a trace, and what is known when each of them is planned."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engines.simulate.cluster import step_requests
from engines.simulate.trace import Trace
from schemas.rollout import LengthHistory, RequestId, RolloutRequest


@dataclass(frozen=True, slots=True)
class StepScript:
    """One step."""

    step: int
    epoch: int
    requests: Mapping[str, Sequence[RolloutRequest]]
    """Requests by prompt, in the order of the trace."""
    history: Mapping[str, LengthHistory]
    """Lengths of those of its prompts that finished rollouts had when it was planned."""

    @property
    def group_size(self) -> int:
        return max(len(group) for group in self.requests.values())

    @property
    def num_rollouts(self) -> int:
        return sum(len(group) for group in self.requests.values())


@dataclass(frozen=True, slots=True)
class Script:
    """Steps that follow each other."""

    steps: tuple[StepScript, ...]
    lengths: Mapping[RequestId, int]
    """Response tokens of every rollout."""


def read_script(trace: Trace, steps: Sequence[int]) -> Script:
    """Raises ValueError when the steps do not follow each other or the trace lacks one.

    A step is planned while the one before is rolled out, so what it knows ends with the step before
    that one.
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


class TraceLengths:
    """Median and longest response of every group of a trace."""

    def __init__(self, trace: Trace) -> None:
        keys = trace.table["prompt_key"].combine_chunks().dictionary_encode()
        prompts, steps = keys.indices.to_numpy(), trace.column("step")
        lengths = trace.column("response_tokens")
        order = np.lexsort((lengths, steps, prompts))
        prompts, steps, lengths = prompts[order], steps[order], lengths[order]
        cuts = np.flatnonzero((np.diff(prompts) != 0) | (np.diff(steps) != 0)) + 1
        firsts = [0, *cuts.tolist()]
        names = keys.dictionary.to_pylist()
        self._groups: dict[str, list[tuple[int, float, int]]] = {}
        for first, group in zip(firsts, np.split(lengths, cuts), strict=True):
            of_prompt = self._groups.setdefault(names[prompts[first]], [])
            of_prompt.append((int(steps[first]), float(np.median(group)), int(group[-1])))

    def before(self, step: int, prompt_keys: Iterable[str]) -> dict[str, LengthHistory]:
        """Lengths in the last step before this one that had the prompt, and in the one before
        that."""
        history = {}
        for key in prompt_keys:
            earlier = [group for group in self._groups[key] if group[0] < step]
            if earlier:
                _, median, longest = earlier[-1]
                previous = earlier[-2][1] if len(earlier) > 1 else None
                history[key] = LengthHistory(median, longest, previous)
        return history
