"""A step's samples in one queue (`engines.histopipe.sample_queue`), in a paper's setting."""

from collections.abc import Callable
from functools import cache

from refrain.benchmarks.papers.pipeline import Configuration, Planner
from refrain.benchmarks.papers.script import StepScript
from refrain.benchmarks.papers.windows import GatedHistory, TokenLatency
from refrain.engines.histopipe.group_lengths import GroupLengths
from refrain.engines.histopipe.sample_queue import EngineLimits, SampleQueue
from refrain.engines.histopipe.step_end import StepPace, TokenTimes
from refrain.engines.latency.interface import Latency
from refrain.schemas.simulate import ClusterLayout

Lengths = Callable[[StepScript], GroupLengths]


def by_history(step: StepScript) -> GroupLengths:
    """Return what a run expects when the step begins."""
    limit = max(r.max_response_tokens for group in step.requests.values() for r in group)
    return GroupLengths(list(step.requests), step.history, step.group_size, limit)


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
