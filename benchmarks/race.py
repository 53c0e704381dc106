"""Race responses on an idle engine, on real engines: how long until they continue there? The bench
also checks that no token changes.

One engine generates a few long responses. Halfway, all are copied to a second engine, in two modes
in turn:

    recompute    the second engine computes their KV cache again
    kv           the KV cache is saved in shared memory and loaded by the second engine

Both engines generate them to the end. All tokens must be the same as on one engine alone.

    begin_ms     from the order to copy to a copy's next token, median
    copy_ms      the part until the first engine has delivered the copies
    pause_ms     the part until the first engine has paused, so that it can save
    save_ms      until its ranks have written

Without a CONFIG the model is the one of `refrain bench switch`.
"""

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from refrain.benchmarks import migration_laps, one_step
from refrain.benchmarks.laps import Measured, Row, check_counts, median_of, rows_with
from refrain.benchmarks.migration_laps import Finished, finish, generate, until_begun
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport
from refrain.schemas.config import EngineConfig, TrainConfig
from refrain.schemas.drafting import DraftModel, SpecActorConfig
from refrain.schemas.rollout import RolloutRequest
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.run.ray_cluster import ray_cluster

PACKAGES = one_step.PACKAGES
MODES = ("recompute", "kv")
TIMES = ("begin_ms", "copy_ms", "pause_ms", "save_ms")


def add_arguments(parser: ArgumentParser) -> None:
    migration_laps.add_arguments(parser, num_responses=4)


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "responses", "laps")
    with TemporaryDirectory(prefix="refrain-bench-") as directory:
        config = migration_laps.config_of(args, Path(directory))
        rows = asyncio.run(_measure(config, args, console))
    return _figures(rows, args.contexts), rows


def show(report: BenchReport, console: Console) -> None:
    columns = ("context", *(name.removesuffix("_ms") for name in TIMES), "no prefill")
    table = plain_table("", *columns, text=("",))
    for context in sorted({row["context"] for row in report.rows}):
        for mode in MODES:
            laps = rows_with(report.rows, mode=mode, context=context)
            times = (f"{median_of(laps, column):.0f}" for column in TIMES)
            table.add_row(mode, f"{context}", *times, f"{median_of(laps, 'cached_share'):.0%}")
    console.print(table)
    console.print("times in ms; no prefill: tokens that the second engine did not compute")
    for name, value in report.figures.items():
        console.print(f"{name}: {value:.2f}")


async def _measure(config: TrainConfig, args: Namespace, console: Console) -> list[Row]:
    work, weights = migration_laps.work_of(config, args)
    with ray_cluster("bench", [migration_laps.two_engines(config)]) as placement:
        gpus = config.rollout.tp_degree if placement.num_gpus else 0
        engines = [RayEngine(i, _config(config), num_gpus=gpus) for i in range(2)]
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            return await _laps(engines, weights, work, args.laps, console)
        finally:
            for engine in engines:
                await engine.shutdown()


def _config(config: TrainConfig) -> EngineConfig:
    """Return the config of an engine that races; it has no drafts here."""
    drafter = DraftModel(name="none", path=config.model.path)
    return EngineConfig(
        model=config.model,
        rollout=config.rollout,
        max_model_len=config.max_model_len,
        seed=config.seed,
        specactor=SpecActorConfig(draft_models=(drafter,)),
    )


async def _laps(
    engines: Sequence[RayEngine],
    weights: PolicyWeights,
    work: migration_laps.Work,
    num_laps: int,
    console: Console,
) -> list[Row]:
    expected: Finished = {}
    await _load(engines, weights)
    for requests in work.values():
        expected |= await generate(engines[0], requests)

    async def race(requests: Sequence[RolloutRequest], mode: str) -> Row:
        await _load(engines, weights)
        return await _race(*engines, requests, mode, expected)

    return await migration_laps.laps_of(race, work, MODES, num_laps, console)


async def _load(engines: Sequence[RayEngine], weights: PolicyWeights) -> None:
    """Load the weights, which also empties the prefix caches."""
    await asyncio.gather(*(engine.load_weights(weights) for engine in engines))
    await asyncio.gather(*(engine.take_kv_counts() for engine in engines))


async def _race(
    origin: RayEngine,
    target: RayEngine,
    requests: Sequence[RolloutRequest],
    mode: str,
    expected: Finished,
) -> Row:
    await origin.submit(requests)
    await until_begun(origin, requests)
    ordered_s, started_s = time.time(), time.perf_counter()
    copies = await origin.copy([request.id for request in requests], keep_kv=mode == "kv")
    copy_s = time.perf_counter() - started_s
    first = await generate(target, migration_laps.one_token_of(copies))
    counts = await origin.take_kv_counts()
    there, here = await asyncio.gather(generate(target, copies), finish(origin, len(requests)))
    return {
        "mode": mode,
        **migration_laps.compared([here, there], expected),
        "num_raced": len(copies),
        **migration_laps.contexts_of(copies, first),
        "num_bytes": counts.num_bytes,
        "begin_ms": 1e3 * (median(r.finished_s for r in first.values()) - ordered_s),
        "copy_ms": 1e3 * copy_s,
        "pause_ms": 1e3 * counts.pause_s,
        "save_ms": 1e3 * counts.copy_s,
    }


def _figures(rows: Sequence[Row], contexts: Sequence[int]) -> dict[str, float]:
    """Return times with the longest contexts, and shares of the time with each context."""
    figures = migration_laps.identical_shares(rows, MODES)
    for context in contexts:
        begins = {m: median_of(rows, "begin_ms", mode=m, context=context) for m in MODES}
        figures |= {f"begin_ms_{mode}_{context}": value for mode, value in begins.items()}
        figures[f"begin_ratio_{context}"] = begins["kv"] / begins["recompute"]
    longest = rows_with(rows, context=max(contexts), mode="kv")
    for column in (*TIMES[1:], "num_bytes", "num_raced", "context_tokens", "cached_share"):
        figures[column] = median_of(longest, column)
    return figures
