"""The driver under long responses: is its event loop ever blocked, does it hold their tokens?

Engines that make up tokens replace vLLM, and a reader of the training rows replaces the trainer.
Everything else is real: Ray actors, Ray engines, coordinator, store, scorer. The step runs twice in
one driver, first with responses of a few tokens. Figures of the second run:

    longest_block_ms        the longest time without a turn of the event loop
    longest_block_cpu_ms    the same in CPU time of its thread, without other processes
    driver_bytes_per_token  growth of the driver's peak memory for each further response token

On a busy machine, longest_block_ms includes the time in which the loop waits for a core.
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

from benchmarks.laps import Measured, Row
from benchmarks.one_step import step_requests
from benchmarks.stand_ins import (
    GROUP_SIZE,
    NUM_ENGINES,
    MadeUpEngine,
    made_up_config,
    made_up_prompts,
)
from engines.reports.tables import plain_table
from engines.rollout.coordinator import Coordinator
from engines.rollout.interface import EngineEvents
from engines.store.actor import StoreClient, start_store
from engines.store.rows import rollout_rows
from schemas.bench import BenchReport
from schemas.config import TrainConfig
from schemas.data import Prompt
from schemas.rollout import FinishedRollout, Rollout, Split
from schemas.weights import PolicyWeights

PACKAGES = ("refrain", "ray", "duckdb", "pyarrow")
TINY_TOKENS = 16
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

    async def next_events(self, num_received: int) -> tuple[EngineEvents, pa.Table | None]:
        await asyncio.sleep(_EVENT_S)
        del self._told[: num_received - self._num_received]
        self._num_received = num_received
        self._told += self._finish(_FINISHED_AT_ONCE)
        finished = tuple(rollout.without_tokens(row) for row, rollout in enumerate(self._told))
        progress = {request.id: 1 for request in self._queue}
        return EngineEvents(finished, progress), rollout_rows(self._told) if finished else None


class StandInTrainer:
    """Reads a batch as a trainer rank does."""

    def train_step(self, batch: pa.Table) -> int:
        from engines.learn.rollouts import read_rollouts

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
        "--tokens", type=int, default=16_384, help="tokens of each response [default: %(default)s]"
    )


def measure(args: Namespace, console: Console) -> Measured:
    if args.rollouts < GROUP_SIZE or args.rollouts % GROUP_SIZE or args.tokens <= TINY_TOKENS:
        raise ValueError(
            f"--rollouts is a multiple of {GROUP_SIZE}, --tokens above {TINY_TOKENS}: "
            f"not {args.rollouts} and {args.tokens}"
        )
    with TemporaryDirectory(prefix="refrain-bench-") as directory:
        rows = asyncio.run(_measure(args, Path(directory), console))
    tiny, full = rows
    figures = {
        "longest_block_ms": full["longest_block_ms"],
        "longest_block_cpu_ms": full["longest_block_cpu_ms"],
        "driver_bytes_per_token": (full["peak_bytes"] - tiny["peak_bytes"]) / full["num_tokens"],
        "rollouts_per_s": args.rollouts / full["seconds"],
    }
    return figures, rows


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("response", "seconds", "longest block, ms", "of the CPU, ms", "peak, MB")
    for row in report.rows:
        values = (row["seconds"], row["longest_block_ms"], row["longest_block_cpu_ms"])
        megabytes = row["peak_bytes"] / 1e6
        table.add_row(f"{row['response_tokens']:,}", *(f"{v:.1f}" for v in (*values, megabytes)))
    console.print(table)
    per_token = report.figures["driver_bytes_per_token"]
    console.print(f"{per_token:.3f} bytes of the driver's memory for each further token")


async def _measure(args: Namespace, directory: Path, console: Console) -> list[Row]:
    from tasks.run.ray_cluster import ray_cluster

    rows = []
    with ray_cluster("driver"):
        for num_tokens in (TINY_TOKENS, args.tokens):
            async with asyncio.timeout(_TIMEOUT_S):
                row = await _step(directory / f"{num_tokens}.duckdb", args.rollouts, num_tokens)
            rows.append({"rollouts": args.rollouts, "response_tokens": num_tokens, **row})
            console.print(f"responses of {num_tokens:,} tokens: {row['seconds']:.0f} s")
    return rows


async def _step(path: Path, num_rollouts: int, num_tokens: int) -> Row:
    """Run one training step in a store of its own; return its row."""
    import ray

    from engines.inference.engine.ray_engine import RayEngine
    from engines.reward import ScorerPool

    config = made_up_config(path.parent, "driver", num_rollouts, num_tokens)
    engine_class: Any = StandInEngine
    engines = [RayEngine(i, config.engine, 0, engine_class) for i in range(NUM_ENGINES)]
    coordinator, scorers = Coordinator(engines), ScorerPool(config)
    store_actor, trainer = start_store(path), ray.remote(num_cpus=0)(StandInTrainer).remote()
    store = StoreClient(store_actor)
    await asyncio.gather(coordinator.start(), scorers.start(), store.call("last_step"))
    gc.freeze()
    started_s = time.perf_counter()
    async with watched() as watch:
        trained = await _rolled_out(config, coordinator, store, scorers, trainer)
    seconds = time.perf_counter() - started_s
    assert trained == num_rollouts * num_tokens
    await asyncio.gather(coordinator.shutdown(), scorers.shutdown())
    for actor in (store_actor, trainer):
        ray.kill(actor)
    return {
        "seconds": seconds,
        "num_tokens": trained,
        "longest_block_ms": 1e3 * watch.longest_s,
        "longest_block_cpu_ms": 1e3 * watch.longest_cpu_s,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


async def _rolled_out(
    config: TrainConfig, coordinator: Coordinator, store: StoreClient, scorers: Any, trainer: Any
) -> int:
    """Return the number of tokens that were rolled out, scored and read by the trainer."""
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

    requests = await asyncio.to_thread(step_requests, config, prompts.values())
    assignments = [(i // GROUP_SIZE % NUM_ENGINES, request) for i, request in enumerate(requests)]
    scoring = asyncio.create_task(score())
    weights = PolicyWeights(0, b"", ())
    await coordinator.roll_out(assignments, keep, lambda _: None, weights=weights, label="train/1")
    scoring.cancel()
    await asyncio.gather(scoring, return_exceptions=True)
    await _score_new(store, scorers, prompts)
    rows = await store.rows("training_rows", 1)
    return await trainer.train_step.remote(rows.reference)


async def _score_new(store: StoreClient, scorers: Any, prompts: dict[str, Prompt]) -> None:
    unscored = await store.rows("scoring_rows", Split.TRAIN, 1)
    if unscored.counts.num_rows:
        rewards = await scorers.score(unscored, prompts)
        await store.call("add_rewards", Split.TRAIN, 1, rewards)
