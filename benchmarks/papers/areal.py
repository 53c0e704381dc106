"""AReaL (arXiv 2505.24298), as RhymeRL compares itself with it (3.2, 7.1): no step has an end.

    engine 0   ██████▌↻█████████▌↻███████████▌↻████     ↻ new weights: keys and values of what runs
    engine 1   ████████▌↻███████▌↻█████████▌↻██████       are computed again, and it goes on
    trainer        ██ 1 ██      ██ 2 ██   ██ 3 ██       each of the first samples that are there

Requests are drawn in the order of the trace, one by one, for the engine with the fewest, as many at
once as a batch has (its default), as far as the bound on staleness eta lets them: with version i
there, so that `(drawn - 1) // batch_size <= i + eta` (AReaL, equation 3). The trainer takes the
samples that were begun with the oldest version, and of these those that finished first, when there
are enough, and every engine takes the new weights at once.

That bound is on how many are drawn, not on how old a sample is: a long one may outlive it. With
`keeps_bound` the trainer waits for those that its next batch would find older than eta; so nothing
is thrown away, as RhymeRL says of AReaL, which would cost more. Kind to AReaL: it knows the load of
every engine, and its scheduling takes no time. Deviations: as in `benchmarks.papers.pipeline`.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.papers.pipeline import COOL_DOWN, WARM_UP, oldest_version, pipelined_step
from benchmarks.papers.script import Script
from engines.latency.interface import Latency
from engines.simulate.clock import run_virtual
from engines.simulate.cluster import check_latency
from engines.simulate.engine import VirtualEngine
from schemas.rollout import RequestId, Rollout, RolloutRequest
from schemas.simulate import ClusterLayout, PipelinedStep, SimulatedPipeline
from schemas.weights import PolicyWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """How a run without steps is done."""

    name: str
    staleness: int
    """eta, at least 0."""
    keeps_bound: bool = False
    """No sample is older than eta when it is trained on: the trainer waits for it."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A sample that was trained on."""

    rollout: Rollout
    version: int
    """Version that was trained."""

    @property
    def staleness(self) -> int:
        return self.version - oldest_version(self.rollout)


@dataclass(frozen=True, slots=True)
class _Version:
    """State when a version was there: the time, the tokens generated, whether all are drawn."""

    at_s: float
    num_tokens: int
    all_drawn: bool


@dataclass(frozen=True, slots=True)
class AsynchronousRun:
    """Batches in the order in which they were trained."""

    batches: tuple[tuple[Trained, ...], ...]
    taken_s: tuple[float, ...]
    """When the trainer had each batch."""
    versions: tuple[_Version, ...]
    engines: tuple[VirtualEngine, ...]
    most_drawn: tuple[int, ...]
    """Requests drawn by the time that each version was replaced."""


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
    """Deterministic. `measured`: steps whose samples are counted; the script has more of them
    behind, so that engines stay busy. A row is a step's samples, whenever they were trained on.

    What is measured is tokens a second, from the first versions until all requests are drawn: the
    first batches are of short responses, so samples a second would be too many. Raises ValueError
    when nothing is left between these.
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
    """Steps that overlapping runs of this script are measured by."""
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
    """Every request of the script, generated and trained on once; deterministic."""
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
    run = _Run(way, engines, deque(requests), batch_size, train_s, places)
    run_virtual(run.run())
    _check(script, run)
    return AsynchronousRun(
        tuple(run.batches), tuple(run.taken_s), tuple(run.versions), engines, tuple(run.most_drawn)
    )


@dataclass(slots=True)
class _Run:
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
    """Version that each request was begun with, by engine."""
    num_begun: Counter[int] = field(default_factory=Counter)
    """Requests that run, by the version they were begun with."""
    refreshing: bool = False
    """Engines take a new version: nothing is drawn until all have it."""
    finished: list[Rollout] = field(default_factory=list)
    """Samples that wait for the trainer."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    batches: list[tuple[Trained, ...]] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    versions: list[_Version] = field(default_factory=list)
    most_drawn: list[int] = field(default_factory=list)

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
                self.news.set()

    async def _draw(self) -> None:
        """Draw as many as there may be, for the engines with the fewest."""
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
        """Equation 3, of one more."""
        bound = self.version + self.way.staleness
        return not self.refreshing and self.num_drawn // self.batch_size <= bound

    async def _train(self) -> None:
        while not self._complete:
            self.news.clear()
            await self.news.wait()
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
        """Whether the trainer has what it begins with."""
        left = len(self.waiting) + sum(len(own) for own in self.running.values())
        if left and len(self.finished) < self.batch_size:
            return False
        if not self.way.keeps_bound:
            return True
        # In the next batch these would be too old.
        due = self.version - self.way.staleness
        return not any(num and begun <= due for begun, num in self.num_begun.items())

    async def _refresh_all(self) -> None:
        """A new version: what runs is interrupted, and goes on with it."""
        now_s, num_tokens = asyncio.get_running_loop().time(), self.num_finished_tokens
        self.refreshing = True
        num_tokens += sum(await asyncio.gather(*map(self._refresh, self.engines)))
        self.refreshing = False
        self.versions.append(_Version(now_s, num_tokens, not self.waiting))
        await self._draw()

    async def _refresh(self, engine: VirtualEngine) -> int:
        """Returns the tokens that its unfinished requests have."""
        requests = await engine.withdraw(list(self.running[engine.index]))
        await engine.load_weights(PolicyWeights(self.version, b"", ()))
        if requests:
            await engine.submit(requests)
        return sum(len(r.generated.token_ids) for r in requests if r.generated)


def _check(script: Script, run: _Run) -> None:
    """Check what must hold of every run."""
    trained = [sample for batch in run.batches for sample in batch]
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
    for batch in run.batches:
        for sample in batch:
            by_step[sample.rollout.request.id.step].append(sample)
    return [_row(step, own) for step, own in by_step.items()]


def _row(step: int, own: Sequence[Trained]) -> PipelinedStep:
    rollouts = [sample.rollout for sample in own]
    return pipelined_step(
        step,
        rollouts,
        [sample.staleness for sample in own],
        called_s=min(rollout.started_s for rollout in rollouts),
        finished_s=max(rollout.finished_s for rollout in rollouts),
        num_planned=len(own),
    )


def _idle_share(engine: VirtualEngine, start_s: float, end_s: float) -> float:
    busy_s = sum(
        max(0.0, min(interval.end_s, end_s) - max(interval.start_s, start_s))
        for interval in engine.intervals
    )
    return max(0.0, 1.0 - busy_s / (end_s - start_s))
