"""Move unfinished responses to an engine of twice the TP degree, on real engines: how long does it
take, and does a token change?

Two engines generate a few long responses. Halfway, all responses move to one engine that has the
ranks of both, in three modes in turn:

    recompute    the new engine computes their KV cache again
    kv           the KV cache is saved in shared memory and loaded by the new engine
    precopy      as kv, but most of it is saved while the engines go on

All tokens must be the same as without a switch. On GPUs both layouts share the same GPUs. On a CPU
they share the cores, so only the parts of a switch mean something, not the speed after it.

    ahead_ms     before the switch, while the engines go on
    stop_ms      from the order to stop to a response's next token: median and last
    pause_ms     the part until the slower engine has stopped
    export_ms    until the ranks of the slower engine have written
    wake_ms      until the higher layout has its GPUs
    resume_ms    from then to a response's next token, median

Without a CONFIG the model is a small untrained one, whose KV cache takes 16 kB per token. As with
large models, little else takes time.
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
from refrain.benchmarks.migration_laps import (
    Finished,
    Work,
    compared,
    config_of,
    contexts_of,
    finish,
    generate,
    identical_shares,
    laps_of,
    one_token_of,
    two_engines,
    until_begun,
    work_of,
)
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.pat.layouts import merge_devices
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport
from refrain.schemas.config import EngineConfig, TrainConfig
from refrain.schemas.engine import EngineSetup
from refrain.schemas.rollout import RequestId, RolloutRequest
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.run.ray_cluster import ray_cluster

PACKAGES = one_step.PACKAGES
MODES = ("recompute", "kv", "precopy")
TIMES = ("ahead_ms", "stop_ms", "stop_last_ms", "pause_ms", "export_ms", "wake_ms", "resume_ms")
SHOWN = ("ahead_ms", "stop_ms", "pause_ms", "export_ms", "resume_ms")


class Layouts:
    """The same GPUs twice: two engines, or one of twice their TP degree."""

    def __init__(self, config: TrainConfig, on_gpus: bool) -> None:
        low = config.rollout.tp_degree
        gpus = [tuple(range(i * low, (i + 1) * low)) if on_gpus else () for i in range(2)]
        self.low = [_engine(config, i, low, gpus[i]) for i in range(2)]
        self.high = _engine(config, 2, 2 * low, merge_devices(gpus))

    async def start(self) -> None:
        await self.high.start()
        await self.high.park()
        await asyncio.gather(*(engine.start() for engine in self.low))

    async def begin(self, weights: PolicyWeights) -> None:
        """Begin in the low layout, with these weights everywhere and empty prefix caches."""
        await self.high.load_weights(weights)
        await asyncio.gather(*(engine.load_weights(weights) for engine in self.low))

    async def save_ahead(self, ids: Sequence[RequestId]) -> None:
        saved = await asyncio.gather(*(engine.precopy(ids) for engine in self.low))
        await self.high.expect_kv([one for one in saved if one])

    async def raise_tp(self) -> float:
        """Switch to the higher layout; return the seconds that it took."""
        started_s = time.perf_counter()
        await asyncio.gather(*(engine.park() for engine in self.low))
        await self.high.wake()
        return time.perf_counter() - started_s

    async def return_to_base(self) -> None:
        await self.high.park()
        await asyncio.gather(*(engine.wake() for engine in self.low))

    async def shutdown(self) -> None:
        for engine in (*self.low, self.high):
            await engine.shutdown()


def _engine(config: TrainConfig, index: int, tp_degree: int, devices: tuple[int, ...]) -> RayEngine:
    rollout = config.rollout.model_copy(update={"tp_degree": tp_degree})
    engine = EngineConfig(
        model=config.model,
        rollout=rollout,
        max_model_len=config.max_model_len,
        seed=config.seed,
        pooled=True,
    )
    return RayEngine(index, engine, num_gpus=0, setup=EngineSetup(devices=devices))


def add_arguments(parser: ArgumentParser) -> None:
    migration_laps.add_arguments(parser, num_responses=16)


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "responses", "laps")
    with TemporaryDirectory(prefix="refrain-bench-") as directory:
        rows = asyncio.run(_measure(config_of(args, Path(directory)), args, console))
    return _figures(rows, args.contexts), rows


def show(report: BenchReport, console: Console) -> None:
    columns = ("context", "MB ahead", "MB", *SHOWN)
    shown = (column.replace("_", " ").replace(" ms", "") for column in columns)
    table = plain_table("", *shown, text=("",))
    for context in sorted({row["context"] for row in report.rows}):
        for mode in MODES:
            laps = rows_with(report.rows, mode=mode, context=context)
            table.add_row(
                mode,
                f"{context}",
                f"{median_of(laps, 'num_bytes_ahead') / 1e6:.1f}",
                f"{median_of(laps, 'num_bytes') / 1e6:.1f}",
                *(f"{median_of(laps, column):.0f}" for column in SHOWN),
            )
    console.print(table)
    console.print("times in ms")
    for name, value in report.figures.items():
        if name.startswith(("stop_ratio", "identical")):
            console.print(f"{name}: {value:.2f}")


async def _measure(config: TrainConfig, args: Namespace, console: Console) -> list[Row]:
    work, weights = work_of(config, args)
    with ray_cluster("bench", [two_engines(config)]) as placement:
        on_gpus = placement.num_gpus > 0
        if on_gpus and config.rollout.kv_cache_bytes is None:
            raise ValueError(
                "the engines of both layouts share the GPUs, and vLLM would give all memory to the "
                "first. Set rollout.kv_cache_bytes, for example to 8589934592"
            )
        layouts = Layouts(config, on_gpus=on_gpus)
        try:
            await layouts.start()
            return await _laps(layouts, weights, work, args.laps, console)
        finally:
            await layouts.shutdown()


async def _laps(
    layouts: Layouts,
    weights: PolicyWeights,
    work: Work,
    num_laps: int,
    console: Console,
) -> list[Row]:
    expected: Finished = {}
    for requests in work.values():
        await layouts.begin(weights)
        parts = [requests[i::2] for i in range(2)]
        for finished in await asyncio.gather(*map(generate, layouts.low, parts)):
            expected |= finished

    async def switch(requests: Sequence[RolloutRequest], mode: str) -> Row:
        await layouts.begin(weights)
        return await _switch(layouts, [requests[i::2] for i in range(2)], mode, expected)

    return await laps_of(switch, work, MODES, num_laps, console)


async def _switch(
    layouts: Layouts, parts: Sequence[Sequence[RolloutRequest]], mode: str, expected: Finished
) -> Row:
    ids = [request.id for part in parts for request in part]
    for engine, part in zip(layouts.low, parts, strict=True):
        await engine.submit(part)
    await asyncio.gather(*(until_begun(*pair) for pair in zip(layouts.low, parts, strict=True)))
    started_s = time.perf_counter()
    if mode == "precopy":
        await layouts.save_ahead(ids)
    ahead_s = time.perf_counter() - started_s
    ordered_s = time.time()
    left = await asyncio.gather(
        *(engine.withdraw(ids, keep_kv=mode != "recompute") for engine in layouts.low)
    )
    moved = [request for leaving in left for request in leaving]
    wake_s = await layouts.raise_tp()
    resumed_s = time.time()
    first = await generate(layouts.high, one_token_of(moved))
    num_early = [len(part) - len(leaving) for part, leaving in zip(parts, left, strict=True)]
    early = await asyncio.gather(*map(finish, layouts.low, num_early))
    counts = [await engine.take_kv_counts() for engine in layouts.low]
    finished = early[0] | early[1] | await generate(layouts.high, moved)
    await layouts.return_to_base()
    next_s = [rollout.finished_s for rollout in first.values()]
    return {
        "mode": mode,
        **compared([finished], expected),
        "num_moved": len(moved),
        **contexts_of(moved, first),
        "num_bytes": sum(c.num_bytes for c in counts),
        "num_bytes_ahead": sum(c.num_bytes_ahead for c in counts),
        "ahead_ms": 1e3 * ahead_s,
        "stop_ms": 1e3 * (median(next_s) - ordered_s),
        "stop_last_ms": 1e3 * (max(next_s) - ordered_s),
        "pause_ms": 1e3 * max(c.pause_s for c in counts),
        "export_ms": 1e3 * max(c.export_s for c in counts),
        "wake_ms": 1e3 * wake_s,
        "resume_ms": 1e3 * (median(next_s) - resumed_s),
    }


def _figures(rows: Sequence[Row], contexts: Sequence[int]) -> dict[str, float]:
    """Return the parts of a switch with the longest contexts, and shares of the stopped time with
    each context."""
    figures = identical_shares(rows, MODES)
    for context in contexts:
        stops = {m: median_of(rows, "stop_ms", mode=m, context=context) for m in MODES}
        figures |= {f"stop_ms_{mode}_{context}": value for mode, value in stops.items()}
        figures[f"stop_ratio_{context}"] = stops["precopy"] / stops["kv"]
    longest = rows_with(rows, context=max(contexts))
    counts = ("num_bytes", "num_moved", "context_tokens", "cached_share")
    for column in (*TIMES[3:], *counts):
        figures[column] = median_of(longest, column, mode="kv")
    figures["precopy_export_ms"] = median_of(longest, "export_ms", mode="precopy")
    figures["precopy_resume_ms"] = median_of(longest, "resume_ms", mode="precopy")
    figures["ahead_ms"] = median_of(longest, "ahead_ms", mode="precopy")
    figures["num_bytes_ahead"] = median_of(longest, "num_bytes_ahead", mode="precopy")
    return figures
