"""A step's samples in one queue (`engines.histopipe.sample_queue`), in a paper's setting.

In hindsight, the queue knows the length of every sample (`as_groups`, `KnownLengths`). So it shows
what better forecasts could bring.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from refrain.benchmarks.papers.pipeline import Configuration, Planner
from refrain.benchmarks.papers.script import Script, StepScript
from refrain.benchmarks.papers.windows import GatedHistory, TokenLatency
from refrain.engines.histopipe.group_lengths import GroupLengths
from refrain.engines.histopipe.sample_queue import EngineLimits, SampleQueue
from refrain.engines.histopipe.step_end import StepPace, TokenTimes
from refrain.engines.latency.interface import Latency
from refrain.schemas.rollout import LengthHistory, RequestId
from refrain.schemas.simulate import ClusterLayout

Lengths = Callable[[StepScript], GroupLengths]


def by_history(step: StepScript) -> GroupLengths:
    """Return what a run expects when the step begins."""
    limit = max(r.max_response_tokens for group in step.requests.values() for r in group)
    return GroupLengths(list(step.requests), step.history, step.group_size, limit)


class KnownLengths(GroupLengths):
    """Lengths of groups of one sample each, whose history is the sample itself."""

    def __init__(self, step: StepScript) -> None:
        super().__init__(list(step.requests), step.history, 1, 1)
        self.margin = 1.0
        self._known = step.history

    def tokens(self, prompt_key: str) -> float:
        return self._known[prompt_key].median_tokens

    def remaining(self, prompt_key: str, num_tokens: int) -> float:
        return max(1.0, self.tokens(prompt_key) - num_tokens)

    def most_remaining(self, prompt_key: str, num_tokens: int, *, deferred: bool = False) -> float:
        del deferred
        return self.remaining(prompt_key, num_tokens)


def as_groups(script: Script) -> Script:
    """Return the script with each sample as a group of its own, whose history is its length."""
    lengths = {_alone(id): num_tokens for id, num_tokens in script.lengths.items()}
    return Script(tuple(_apart(step, lengths) for step in script.steps), lengths)


def _alone(id: RequestId) -> RequestId:
    return replace(id, prompt_key=f"{id.prompt_key}/{id.sample_index}", sample_index=0)


def _apart(step: StepScript, lengths: Mapping[RequestId, int]) -> StepScript:
    own = [replace(r, id=_alone(r.id)) for group in step.requests.values() for r in group]
    history = {r.id.prompt_key: LengthHistory(lengths[r.id], lengths[r.id]) for r in own}
    return replace(step, requests={r.id.prompt_key: [r] for r in own}, history=history)


def queued(
    name: str,
    plan: Planner,
    cluster: ClusterLayout,
    latency: Latency,
    *,
    staleness: int,
    train_s: float,
    in_flight: bool = False,
    oversample: float | None = None,
    drafting: GatedHistory | None = None,
    lengths: Lengths = by_history,
) -> Configuration:
    """Return a pipeline whose engines take samples from a queue. `plan`: names the prompts."""
    decoding = TokenLatency(drafting) if drafting else latency
    held = cluster.max_context_tokens or float("inf")

    @cache
    def limits() -> EngineLimits:
        times = TokenTimes(decoding, cluster.tp_degree, cluster.max_num_seqs)
        return EngineLimits(decoding, times, cluster.tp_degree, held)

    queues: list[SampleQueue] = []

    def queue(step: StepScript, num_engines: int) -> SampleQueue:
        pace = StepPace(limits().times, num_engines, staleness, train_s)
        before = queues.pop() if queues else None
        queues.append(SampleQueue(lengths(step), limits(), pace, before))
        return queues[0]

    return Configuration(
        name=name,
        plan=plan,
        staleness=staleness,
        in_flight=in_flight,
        oversample=oversample,
        queue=queue,
        drafting=drafting,
    )
