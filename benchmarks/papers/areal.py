"""AReaL (arXiv 2505.24298), with which RhymeRL compares itself (3.2, 7.1). It has no steps.

    engine 0   ██████▌↻█████████▌↻███████████▌↻████     ↻ new weights: running requests compute
    engine 1   ████████▌↻███████▌↻█████████▌↻██████       their KV cache again and go on
    trainer        ██ 1 ██      ██ 2 ██   ██ 3 ██       takes each batch as soon as it is complete

Requests are drawn one by one in the order of the trace, for the engine with the fewest, up to a
batch at once (AReaL's default). The bound on staleness eta limits them too: with version i,
`(drawn - 1) // batch_size <= i + eta` (AReaL, equation 3). The trainer takes a batch of the samples
that began with the oldest version, those that finished first before others. Every engine takes the
new weights at once.

That bound limits how many samples are drawn, not how old they get: a long one may outlive it. With
`keeps_bound` the trainer waits for samples that would be older than eta in its next batch, so none
is thrown away. Kind to AReaL: it knows every engine's load, and its scheduling takes no time.
Deviations: as in `benchmarks.papers.pipeline`.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from refrain.benchmarks.papers.pipeline import COOL_DOWN, WARM_UP, oldest_version, pipelined_step
from refrain.benchmarks.papers.script import Script
from refrain.engines.latency.interface import Latency
from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.cluster import check_latency
from refrain.engines.simulate.engine import VirtualEngine
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest
from refrain.schemas.simulate import ClusterLayout, PipelinedStep, SimulatedPipeline
from refrain.schemas.weights import PolicyWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """A run without steps."""

    name: str
    staleness: int
    """eta, at least 0."""
    keeps_bound: bool = False
    """Whether the trainer waits for samples that would become older than eta."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained sample."""

    rollout: Rollout
    version: int
    """Version that was trained."""

    @property
    def staleness(self) -> int:
        return self.version - oldest_version(self.rollout)


class _Version(NamedTuple):
    """State at a new version."""

    at_s: float
    num_tokens: int
    """Tokens generated until then."""
    all_drawn: bool


@dataclass(slots=True)
class AsynchronousRun:
    """Draws, generates and trains."""

    way: Asynchronous
    engines: Sequence[VirtualEngine]
    waiting: deque[RolloutRequest]
    batch_size: int
    train_s: float
    places: int
    """Requests that an engine runs at once."""
    version: int = 0
    num_drawn: int = 0
    num_finished_tokens: int = 0
    running: dict[int, dict[RequestId, int]] = field(default_factory=dict)
    """Version with which each request began, by engine."""
    num_begun: Counter[int] = field(default_factory=Counter)
    """Running requests by the version with which they began."""
    refreshing: bool = False
    """Whether engines take a new version. Nothing is drawn until all have it."""
    finished: list[Rollout] = field(default_factory=list)
    """Samples that wait for the trainer."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    batches: list[tuple[Trained, ...]] = field(default_factory=list)
    """Batches in the order of training."""
    taken_s: list[float] = field(default_factory=list)
    """When the trainer took each batch."""
    versions: list[_Version] = field(default_factory=list)
    most_drawn: list[int] = field(default_factory=list)
    """Requests drawn until each version was replaced."""

    async def run(self) -> None:
        self.running = {engine.index: {} for engine in self.engines}
        await self._refresh_all()
        async with asyncio.TaskGroup() as group:
            pumps = [group.create_task(self._pump(engine)) for engine in self.engines]
            while self.waiting or self.finished or any(self.running.values()):
                await self._train()
            for pump in pumps:
                pump.cancel()

    async def _pump(self, engine: VirtualEngine) -> None:
        while True:
            events = await engine.next_events()
            for rollout in events.finished:
                assert isinstance(rollout, Rollout)
                self.num_begun[self.running[engine.index].pop(rollout.request.id)] -= 1
                self.num_finished_tokens += rollout.num_tokens
                self.finished.append(rollout)
            if events.finished:
                await self._draw()
                self.arrived.set()

    async def _draw(self) -> None:
        """Draw as many requests as the bound allows, for the engines with the fewest."""
        drawn: dict[int, list[RolloutRequest]] = {}
        while self.waiting and self._may_draw:
            index = min(self.running, key=lambda index: len(self.running[index]))
            if len(self.running[index]) == self.places:
                break
            self.num_drawn += 1
            self.num_begun[self.version] += 1
            request = self.waiting.popleft()
            self.running[index][request.id] = self.version
            drawn.setdefault(index, []).append(request)
        for index, requests in drawn.items():
            await self.engines[index].submit(requests)

    @property
    def _may_draw(self) -> bool:
        """Whether equation 3 allows one more."""
        bound = self.version + self.way.staleness
        return not self.refreshing and self.num_drawn // self.batch_size <= bound

    async def _train(self) -> None:
        while not self._complete:
            self.arrived.clear()
            await self.arrived.wait()
        # Sorting is stable: of equal ones those that finished first.
        self.finished.sort(key=oldest_version)
        size = self.batch_size
        batch, self.finished = self.finished[:size], self.finished[size:]
        self.batches.append(tuple(Trained(rollout, self.version) for rollout in batch))
        self.taken_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.train_s)
        self.most_drawn.append(self.num_drawn)
        self.version += 1
        await self._refresh_all()

    @property
    def _complete(self) -> bool:
        """Whether the trainer may begin."""
        left = len(self.waiting) + sum(len(own) for own in self.running.values())
        if left and len(self.finished) < self.batch_size:
            return False
        if not self.way.keeps_bound:
            return True
        # In the next batch these samples would be too old.
        due = self.version - self.way.staleness
        return not any(num and begun <= due for begun, num in self.num_begun.items())

    async def _refresh_all(self) -> None:
        """Interrupt running requests, which go on with the new version."""
        now_s, num_tokens = asyncio.get_running_loop().time(), self.num_finished_tokens
        self.refreshing = True
        num_tokens += sum(await asyncio.gather(*map(self._refresh, self.engines)))
        self.refreshing = False
        self.versions.append(_Version(now_s, num_tokens, not self.waiting))
        await self._draw()

    async def _refresh(self, engine: VirtualEngine) -> int:
        """Return the tokens of the engine's unfinished requests."""
        requests = await engine.withdraw(list(self.running[engine.index]))
        await engine.load_weights(PolicyWeights(self.version, b"", ()))
        if requests:
            await engine.submit(requests)
        return sum(len(r.generated.token_ids) for r in requests if r.generated)


def simulate_asynchronous(
    script: Script,
    cluster: ClusterLayout,
    latency: Latency,
    way: Asynchronous,
    *,
    measured: Sequence[int],
    train_s: float = 0.0,
    sync_s: float = 0.0,
) -> SimulatedPipeline:
    """Simulate the run. Deterministic. Only samples of the steps `measured` count. The script has
    more steps, so that engines stay busy. A row has a step's samples, whenever they were trained.

    The rate is in tokens a second, from the first versions until all requests are drawn. The first
    batches have short responses, so a rate in samples would be too high. Raise ValueError if
    nothing is left in between.
    """
    run = run_asynchronous(script, cluster, latency, way, train_s=train_s, sync_s=sync_s)
    known = [version for version in run.versions[WARM_UP:] if not version.all_drawn]
    if len(known) < 2:
        raise ValueError(
            f"{len(script.steps)} steps are too few: all are drawn before version {WARM_UP + 1}"
        )
    first, last = known[0], known[-1]
    tokens_per_s = (last.num_tokens - first.num_tokens) / (last.at_s - first.at_s)
    rows = _rows(script, run)
    counted = [row for row in rows if row.step in measured]
    return SimulatedPipeline(
        configuration=way.name,
        steps=tuple(rows),
        measured=tuple(measured),
        seconds=sum(row.num_tokens for row in counted) / tokens_per_s,
        idle_shares=tuple(_idle_share(engine, first.at_s, last.at_s) for engine in run.engines),
    )


def measured_steps(script: Script) -> tuple[int, ...]:
    """Return the steps that count in overlapping runs of this script."""
    return tuple(step.step for step in script.steps[WARM_UP:-COOL_DOWN])


def run_asynchronous(
    script: Script,
    cluster: ClusterLayout,
    latency: Latency,
    way: Asynchronous,
    *,
    train_s: float = 0.0,
    sync_s: float = 0.0,
) -> AsynchronousRun:
    """Generate and train every request of the script once. Deterministic."""
    check_latency(latency, cluster.tp_degree)
    engines = tuple(
        VirtualEngine(
            index,
            cluster.tp_degree,
            latency,
            script.lengths,
            max_num_seqs=cluster.max_num_seqs,
            max_context_tokens=cluster.max_context_tokens,
            sync_s=sync_s,
        )
        for index in range(cluster.num_engines)
    )
    requests = [r for step in script.steps for group in step.requests.values() for r in group]
    batch_size = script.steps[0].num_rollouts
    places = min(cluster.max_num_seqs, -(-batch_size // cluster.num_engines))
    run = AsynchronousRun(way, engines, deque(requests), batch_size, train_s, places)
    run_virtual(run.run())
    _check(script, run)
    return run


def _check(script: Script, run: AsynchronousRun) -> None:
    """Check what every run must satisfy."""
    trained = list(chain.from_iterable(run.batches))
    lengths = {
        sample.rollout.request.id: len(sample.rollout.generated.token_ids) for sample in trained
    }
    assert len(trained) == len(lengths)
    assert lengths == script.lengths, "not the lengths of the trace"
    eta, size = run.way.staleness, run.batch_size
    for version, drawn in enumerate(run.most_drawn):
        assert (drawn - 1) // size <= version + eta, f"version {version}: {drawn} are drawn"
    if run.way.keeps_bound:
        oldest = max(sample.staleness for sample in trained)
        assert oldest <= eta, f"trains on what is {oldest} old"


def _rows(script: Script, run: AsynchronousRun) -> list[PipelinedStep]:
    by_step: dict[int, list[Trained]] = {step.step: [] for step in script.steps}
    for sample in chain.from_iterable(run.batches):
        by_step[sample.rollout.request.id.step].append(sample)
    return [
        pipelined_step(
            step,
            [sample.rollout for sample in own],
            [sample.staleness for sample in own],
            called_s=min(sample.rollout.started_s for sample in own),
            finished_s=max(sample.rollout.finished_s for sample in own),
            num_planned=len(own),
        )
        for step, own in by_step.items()
    ]


def _idle_share(engine: VirtualEngine, start_s: float, end_s: float) -> float:
    busy_s = sum(
        max(0.0, min(interval.end_s, end_s) - max(interval.start_s, start_s))
        for interval in engine.intervals
    )
    return max(0.0, 1.0 - busy_s / (end_s - start_s))
