"""The driver under long responses: is its event loop ever blocked, does it hold their tokens?

Engines that make up tokens replace vLLM, and a reader of the training rows replaces the trainer.
Everything else is real: Ray actors, Ray engines, coordinator, store, scorer. The step runs twice in
one driver, first with responses of a few tokens. Figures of the second run:

    longest_block_ms        the longest time without a turn of the event loop
    longest_block_cpu_ms    the same in CPU time of its thread, without other processes
    driver_bytes_per_token  growth of the driver's peak memory for each further response token

Then it runs with responses of a few tokens on many engines, which are all in one Ray actor. They
finish rollouts faster than the driver can store them. Figures of this run end in `_N_engines`:

    rollouts_per_s          finished and stored rollouts a second
    driver_cpu_ms           CPU time of the event loop's thread for each of them

Then half of 64 engines race the requests of the other half, all by one decision
(`benchmarks.driver_races`). Figure of this run:

    races_longest_hold_up_ms    the longest time that the events of an engine waited for the driver

On a busy machine, times include those in which the loop waits for a core.
"""

import asyncio
import gc
import resource
import time
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from rich.console import Console

from refrain.benchmarks.driver_races import race_at_once
from refrain.benchmarks.laps import Measured, Row
from refrain.benchmarks.one_step import step_requests
from refrain.benchmarks.stand_ins import (
    GROUP_SIZE,
    NUM_ENGINES,
    MadeUpEngine,
    made_up_config,
    made_up_prompts,
)
from refrain.engines.actors import RemoteActor
from refrain.engines.gpus.cleanup import Marked, given_gpus, mark_children
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.reports.tables import plain_table
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.interface import EngineEvents
from refrain.engines.store.actor import StoreClient, start_store
from refrain.engines.store.rows import rollout_rows, to_stream
from refrain.schemas.bench import BenchReport
from refrain.schemas.config import EngineConfig, TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.rollout import FinishedRollout, Rollout, Split
from refrain.schemas.weights import PolicyWeights

PACKAGES = ("refrain-rl", "ray", "duckdb", "pyarrow")
TINY_TOKENS = 16
MANY_ENGINES = 256
NUM_WORDS = 100
"""Upper bound of token ids."""
_TICK_S = 0.002
"""Seconds between two looks at the event loop."""
_EVENT_S = 0.1
_FINISHED_AT_ONCE = 8
_SCORE_EVERY_S = 1.0
_TIMEOUT_S = 1200.0


class StandInEngine(MadeUpEngine):
    """An engine that looks like `VLLMEngine` to its caller and finishes some requests with each
    event."""

    def __init__(self, index: int, *_: Any) -> None:
        super().__init__(index, NUM_WORDS)
        self._told: list[Rollout] = []
        self._num_received = 0

    def mark_processes(self, mark: str) -> Marked:
        import ray

        mark_children(mark)
        return Marked(mark, ray.get_runtime_context().get_node_id(), given_gpus())

    async def next_events(self, num_received: int) -> tuple[EngineEvents, pa.Buffer | None]:
        await asyncio.sleep(_EVENT_S)
        del self._told[: num_received - self._num_received]
        self._num_received = num_received
        self._told += self._finish(_FINISHED_AT_ONCE)
        finished = tuple(rollout.without_tokens(row) for row, rollout in enumerate(self._told))
        progress = {request.id: 1 for request in self._queue}
        rows = to_stream(rollout_rows(self._told)) if finished else None
        return EngineEvents(finished, progress), rows


class EngineHost:
    """Actor with many engines."""

    def __init__(self, num_engines: int) -> None:
        self._engines = [StandInEngine(i) for i in range(num_engines)]

    async def call(self, index: int, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._engines[index], method)(*args, **kwargs)

    async def next_events(
        self, index: int, num_received: int
    ) -> tuple[EngineEvents, pa.Buffer | None]:
        return await self._engines[index].next_events(num_received)


class HostedActor(RemoteActor):
    """One engine of an `EngineHost`."""

    def __init__(self, host: Any, index: int) -> None:
        self.name, self.handle, self._index = f"rollout engine {index}", host, index

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        args = ("call", self._index, method, *args)
        return await super().call(*args, timeout_s=timeout_s, **kwargs)

    async def call_with_reference(
        self, method: str, *args: Any, timeout_s: float, **kwargs: Any
    ) -> tuple[Any, Any]:
        args = (method, self._index, *args)
        return await super().call_with_reference(*args, timeout_s=timeout_s, **kwargs)


class HostedEngine(RayEngine):
    """A `RayEngine` that is not alone in its actor."""

    def __init__(self, index: int, config: EngineConfig, host: Any) -> None:
        super().__init__(index, config, 0)
        self._host = host

    async def start(self) -> None:
        self._actor = HostedActor(self._host, self.index)

    async def shutdown(self) -> None: ...


class StandInTrainer:
    """Reads a batch as a trainer rank does."""

    def train_step(self, batch: pa.Table) -> int:
        from refrain.engines.learn.rollouts import read_rollouts

        return sum(rollout.num_response_tokens for rollout in read_rollouts(batch))


class LoopWatch:
    """Longest times between two looks at the event loop."""

    def __init__(self) -> None:
        self.longest_s = self.longest_cpu_s = 0.0

    async def watch(self) -> None:
        while True:
            at_s, cpu_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_TICK_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - at_s - _TICK_S)
            self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - cpu_s)


@asynccontextmanager
async def watched() -> AsyncGenerator[LoopWatch]:
    watch = LoopWatch()
    task = asyncio.create_task(watch.watch())
    try:
        yield watch
    finally:
        task.cancel()


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rollouts", type=int, default=2000, help="rollouts of the step [default: %(default)s]"
    )
    parser.add_argument(
        "--many-rollouts",
        type=int,
        default=20_480,
        help=f"rollouts of the step on {MANY_ENGINES} engines [default: %(default)s]",
    )
    parser.add_argument(
        "--tokens", type=int, default=16_384, help="tokens of each response [default: %(default)s]"
    )


def measure(args: Namespace, console: Console) -> Measured:
    multiples = [num % GROUP_SIZE for num in (args.rollouts, args.many_rollouts)]
    if min(args.rollouts, args.many_rollouts) < GROUP_SIZE or any(multiples):
        raise ValueError(f"--rollouts and --many-rollouts are multiples of {GROUP_SIZE}")
    if args.tokens <= TINY_TOKENS:
        raise ValueError(f"--tokens is above {TINY_TOKENS}, not {args.tokens}")
    with TemporaryDirectory(prefix="refrain-bench-") as directory:
        rows = asyncio.run(_measure(args, Path(directory), console))
    tiny, full, many = rows
    per_token = (full["peak_bytes"] - tiny["peak_bytes"]) / full["num_tokens"]
    figures = {
        "longest_block_ms": full["longest_block_ms"],
        "longest_block_cpu_ms": full["longest_block_cpu_ms"],
        "driver_bytes_per_token": per_token,
        "rollouts_per_s": full["rollouts"] / full["seconds"],
        f"rollouts_per_s_{MANY_ENGINES}_engines": many["rollouts"] / many["seconds"],
        f"driver_cpu_ms_{MANY_ENGINES}_engines": 1e3 * many["cpu_s"] / many["rollouts"],
        f"longest_block_ms_{MANY_ENGINES}_engines": many["longest_block_ms"],
        f"longest_block_cpu_ms_{MANY_ENGINES}_engines": many["longest_block_cpu_ms"],
        "races_longest_hold_up_ms": 1e3 * asyncio.run(race_at_once()),
    }
    return figures, rows


def show(report: BenchReport, console: Console) -> None:
    names = ("block, ms", "its CPU, ms", "CPU, s", "peak, MB")
    table = plain_table("engines", "rollouts", "response", "seconds", *names)
    for row in report.rows:
        sizes = (row["engines"], row["rollouts"], row["response_tokens"])
        values = (row["seconds"], row["longest_block_ms"], row["longest_block_cpu_ms"])
        values = (*values, row["cpu_s"], row["peak_bytes"] / 1e6)
        table.add_row(*(f"{size:,}" for size in sizes), *(f"{v:.1f}" for v in values))
    console.print(table)
    console.print("block: the longest time for which the event loop did one thing")
    per_token = report.figures["driver_bytes_per_token"]
    console.print(f"{per_token:.3f} bytes of the driver's memory for each further token")
    hold_up_ms = report.figures["races_longest_hold_up_ms"]
    console.print(f"events wait for at most {hold_up_ms:.0f} ms while races begin")


async def _measure(args: Namespace, directory: Path, console: Console) -> list[Row]:
    from refrain.tasks.run.ray_cluster import ray_cluster

    rows = []
    with ray_cluster("driver"):
        for num_engines, num_rollouts, num_tokens in (
            (NUM_ENGINES, args.rollouts, TINY_TOKENS),
            (NUM_ENGINES, args.rollouts, args.tokens),
            (MANY_ENGINES, args.many_rollouts, TINY_TOKENS),
        ):
            path = directory / f"{len(rows)}.duckdb"
            async with asyncio.timeout(_TIMEOUT_S):
                row = await _step(path, num_engines, num_rollouts, num_tokens)
            sizes = {"engines": num_engines, "rollouts": num_rollouts}
            rows.append(sizes | {"response_tokens": num_tokens, **row})
            console.print(
                f"{num_engines} engines, responses of {num_tokens:,} tokens: {row['seconds']:.0f} s"
            )
    return rows


async def _step(path: Path, num_engines: int, num_rollouts: int, num_tokens: int) -> Row:
    """Run one training step in a store of its own; return its row."""
    import ray

    from refrain.engines.reward import ScorerPool

    config = made_up_config(path.parent, "driver", num_rollouts, num_tokens)
    engines, actors = _engines(config, num_engines)
    coordinator, scorers = Coordinator(engines), ScorerPool(config)
    store_actor, trainer = start_store(path), ray.remote(num_cpus=0)(StandInTrainer).remote()
    store = StoreClient(store_actor)
    await asyncio.gather(coordinator.start(), scorers.start(), store.call("last_step"))
    gc.freeze()
    started_s, cpu_s = time.perf_counter(), time.thread_time()
    async with watched() as watch:
        trained, rolled_out_s = await _rolled_out(config, coordinator, store, scorers, trainer)
    cpu_s = time.thread_time() - cpu_s
    assert trained == num_rollouts * num_tokens
    await asyncio.gather(coordinator.shutdown(), scorers.shutdown())
    for actor in (store_actor, trainer, *actors):
        ray.kill(actor)
    return {
        "seconds": rolled_out_s - started_s,
        "cpu_s": cpu_s,
        "num_tokens": trained,
        "longest_block_ms": 1e3 * watch.longest_s,
        "longest_block_cpu_ms": 1e3 * watch.longest_cpu_s,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _engines(config: TrainConfig, num_engines: int) -> tuple[list[RayEngine], list[Any]]:
    """Return engines, and the actor that hosts them if they are many."""
    import ray

    if num_engines <= NUM_ENGINES:
        engine_class: Any = StandInEngine
        return [RayEngine(i, config.engine, 0, engine_class) for i in range(num_engines)], []
    host = ray.remote(num_cpus=0)(EngineHost).remote(num_engines)
    return [HostedEngine(i, config.engine, host) for i in range(num_engines)], [host]


async def _rolled_out(
    config: TrainConfig, coordinator: Coordinator, store: StoreClient, scorers: Any, trainer: Any
) -> tuple[int, float]:
    """Return the number of tokens that were rolled out, scored and read by the trainer, and the
    time at which all were rolled out."""
    prompts = made_up_prompts(config, NUM_WORDS)
    news = asyncio.Event()

    async def keep(rollouts: Sequence[FinishedRollout]) -> None:
        await store.add_finished(rollouts, 0)
        news.set()

    async def score() -> None:
        while await news.wait():
            news.clear()
            await _score_new(store, scorers, prompts)
            await asyncio.sleep(_SCORE_EVERY_S)

    num_engines = len(coordinator.living)
    requests = await asyncio.to_thread(step_requests, config, prompts.values())
    assignments = [(i // GROUP_SIZE % num_engines, request) for i, request in enumerate(requests)]
    scoring = asyncio.create_task(score())
    weights = PolicyWeights(0, b"", ())
    await coordinator.roll_out(assignments, keep, lambda _: None, weights=weights, label="train/1")
    rolled_out_s = time.perf_counter()
    scoring.cancel()
    await asyncio.gather(scoring, return_exceptions=True)
    await _score_new(store, scorers, prompts)
    rows = await store.rows("training_rows", 1)
    return await trainer.train_step.remote(rows.reference), rolled_out_s


async def _score_new(store: StoreClient, scorers: Any, prompts: dict[str, Prompt]) -> None:
    unscored = await store.rows("scoring_rows", Split.TRAIN, 1)
    if unscored.counts.num_rows:
        rewards = await scorers.score(unscored, prompts)
        await store.call("add_rewards", Split.TRAIN, 1, rewards)
