"""Unfinished responses go over to an engine of twice the TP degree, on real engines: what it takes,
and what it changes.

Two engines generate one step's responses. When so many of them have finished, the others are taken
out and go on at one engine that has the ranks of both, in turn

    recompute    their keys and values are computed again there
    kv           they are saved in shared memory and loaded there

and all tokens must be as without a switch. On GPUs the two layouts share the same ones; on a CPU
they share the cores, so that only the parts of a switch mean something, not what comes after it.

    pause_ms     until the engines have stopped, the slower one
    export_ms    until their ranks have written, the slower one
    wake_ms      until the higher layout has its GPUs
    resume_ms    from then to a response's next token, the median one and the last one
"""

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import one_step
from benchmarks.laps import Measured, Row, check_counts, in_turn, median_of, rows_with
from engines.gpus.placement import Wanted
from engines.inference.engine.ray_engine import RayEngine
from engines.pat.layouts import merge_devices
from engines.reports.tables import plain_table
from engines.rollout.tracked_engine import num_response_tokens
from flows.config_file import load_config
from schemas.bench import BenchReport
from schemas.config import EngineConfig, TrainConfig
from schemas.rollout import RequestId, Rollout, RolloutRequest
from schemas.weights import PolicyWeights
from tasks.run.ray_cluster import ray_cluster

PACKAGES = one_step.PACKAGES
MODES = ("recompute", "kv")
TIMES = ("pause_ms", "export_ms", "wake_ms", "resume_ms", "resume_last_ms")
Finished = dict[RequestId, Rollout]


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
        """Low, with these weights everywhere, and empty prefix caches."""
        await self.high.load_weights(weights)
        await asyncio.gather(*(engine.load_weights(weights) for engine in self.low))

    async def raise_tp(self) -> float:
        """Seconds that it took."""
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
        devices=devices,
    )
    return RayEngine(index, engine, num_gpus=0)


def add_arguments(parser: ArgumentParser) -> None:
    one_step.add_arguments(parser, "infra/demo/train.yaml")
    parser.add_argument(
        "--left",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="switch when so many of the responses are unfinished [default: 0.5]",
    )


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "prompts", "laps")
    if not 0 < args.left <= 1:
        raise ValueError(f"--left {args.left}: give a share above 0 and up to 1")
    config = load_config(args.config)
    work = one_step.first_step(config, args.prompts)
    rows = asyncio.run(_measure(config, *work, args, console))
    return _figures(rows), rows


def show(report: BenchReport, console: Console) -> None:
    columns = ("identical", "moved", "tokens", "MB", *TIMES)
    shown = (column.replace("_", " ").replace(" ms", "") for column in columns)
    table = plain_table("", *shown, text=("",))
    for mode in MODES:
        laps = rows_with(report.rows, mode=mode)
        table.add_row(
            mode,
            f"{report.figures[f'identical_{mode}']:.1%}",
            f"{median_of(laps, 'num_moved'):.0f}",
            f"{median_of(laps, 'context_tokens'):.0f}",
            f"{median_of(laps, 'num_bytes') / 1e6:.1f}",
            *(f"{median_of(laps, column):.1f}" for column in TIMES),
        )
    console.print(table)
    console.print("times in ms")


async def _measure(
    config: TrainConfig,
    weights: PolicyWeights,
    requests: Sequence[RolloutRequest],
    args: Namespace,
    console: Console,
) -> list[Row]:
    pool = Wanted("two engines", 2 * config.rollout.tp_degree, "twice rollout.tp_degree")
    with ray_cluster("bench", [pool]) as placement:
        on_gpus = placement.num_gpus > 0
        if on_gpus and config.rollout.kv_cache_bytes is None:
            raise ValueError(
                "the engines of both layouts share the GPUs, and vLLM would take all of their "
                "memory for the first: give rollout.kv_cache_bytes"
            )
        layouts = Layouts(config, on_gpus=on_gpus)
        try:
            await layouts.start()
            await layouts.begin(weights)
            parts = [requests[i::2] for i in range(2)]
            one, other = await asyncio.gather(*map(_generate, layouts.low, parts))
            num_left = round(args.left * len(requests))
            rows = []
            for lap in range(args.laps):
                for mode in in_turn(MODES, lap):
                    await layouts.begin(weights)
                    rows.append(await _switch(layouts, parts, mode, num_left, one | other))
                console.print(f"lap {lap + 1}/{args.laps}")
        finally:
            await layouts.shutdown()
    return rows


async def _switch(
    layouts: Layouts,
    parts: Sequence[Sequence[RolloutRequest]],
    mode: str,
    num_left: int,
    expected: Finished,
) -> Row:
    ids = [request.id for part in parts for request in part]
    for engine, part in zip(layouts.low, parts, strict=True):
        await engine.submit(part)
    await asyncio.gather(*(_until_left(engine, ids, num_left // 2) for engine in layouts.low))
    left = await asyncio.gather(
        *(engine.withdraw(ids, keep_kv=mode == "kv") for engine in layouts.low)
    )
    num_early = [len(part) - len(leaving) for part, leaving in zip(parts, left, strict=True)]
    early = await asyncio.gather(*map(_finish, layouts.low, num_early))
    moved = [request for leaving in left for request in leaving]
    counts = [await engine.take_kv_counts() for engine in layouts.low]
    wake_s = await layouts.raise_tp()
    # One token of each, as nobody tells when a response that goes on has its first.
    begun = [replace(r, max_response_tokens=num_response_tokens(r) + 1) for r in moved]
    first = await _generate(layouts.high, begun)
    finished = early[0] | early[1] | await _generate(layouts.high, moved)
    await layouts.return_to_base()
    resume_s = [rollout.finished_s - rollout.started_s for rollout in first.values()]
    context_tokens = sum(len(r.prompt_token_ids) + num_response_tokens(r) for r in moved)
    same = [
        rollout.generated.token_ids == expected[id].generated.token_ids
        for id, rollout in finished.items()
    ]
    return {
        "mode": mode,
        "num_sequences": len(same),
        "num_identical": sum(same),
        "num_moved": len(moved),
        "context_tokens": context_tokens,
        "cached_share": sum(r.num_cached_tokens for r in first.values()) / context_tokens,
        "num_bytes": sum(c.num_bytes for c in counts),
        "pause_ms": 1e3 * max(c.pause_s for c in counts),
        "export_ms": 1e3 * max(c.export_s for c in counts),
        "wake_ms": 1e3 * wake_s,
        "resume_ms": 1e3 * median(resume_s),
        "resume_last_ms": 1e3 * max(resume_s),
    }


async def _generate(engine: RayEngine, requests: Sequence[RolloutRequest]) -> Finished:
    await engine.submit(requests)
    return await _finish(engine, len(requests))


async def _until_left(engine: RayEngine, ids: Sequence[RequestId], num_left: int) -> None:
    """Events come together, too late for this."""
    all_began = False
    while (num := len(await engine.copy(ids))) > num_left or not all_began:
        all_began |= num > num_left
        await asyncio.sleep(0.02)


async def _finish(engine: RayEngine, num: int) -> Finished:
    """Collect at least `num` finished rollouts."""
    finished: Finished = {}
    while len(finished) < num:
        told: Any = (await engine.next_events()).finished
        finished |= {rollout.id: rollout for rollout in await one_step.fetch(told)}
    return finished


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for mode in MODES:
        laps = rows_with(rows, mode=mode)
        identical = sum(row["num_identical"] for row in laps)
        figures[f"identical_{mode}"] = identical / sum(row["num_sequences"] for row in laps)
    counts = ("num_bytes", "num_moved", "context_tokens", "cached_share")
    for column in (*TIMES, *counts):
        figures[column] = median_of(rows, column, mode="kv")
    for column in ("resume_ms", "resume_last_ms"):
        figures[f"recompute_{column}"] = median_of(rows, column, mode="recompute")
    return figures
