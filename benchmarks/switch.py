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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import one_step
from benchmarks.fetched import FetchedRollout, fetch
from engines.inference.engine.ray_engine import RayEngine
from engines.inference.kv.saving import KVCounts
from engines.pat.layouts import merge_devices
from engines.reports.tables import plain_table
from engines.rollout.tracked_engine import num_response_tokens
from flows.config_file import load_config
from schemas.bench import BenchReport
from schemas.config import EngineConfig, TrainConfig
from schemas.rollout import RequestId, RolloutRequest
from schemas.weights import PolicyWeights
from tasks.run.ray_cluster import ray_cluster

MODES = ("recompute", "kv")
Finished = dict[RequestId, FetchedRollout]


@dataclass(frozen=True)
class SwitchLap:
    """One switch."""

    mode: str
    moved: Sequence[RolloutRequest]
    finished: Finished
    counts: KVCounts
    """Seconds are those of the slower engine, bytes those of both."""
    wake_s: float
    resume_s: Sequence[float]
    """Seconds from submission to the next token, of each request that moved."""

    def row(self, expected: Finished) -> dict:
        context = [len(r.prompt_token_ids) + num_response_tokens(r) for r in self.moved]
        cached = [self.finished[r.id].num_cached_tokens for r in self.moved]
        same = [
            rollout.generated.token_ids == expected[id].generated.token_ids
            for id, rollout in self.finished.items()
        ]
        return {
            "mode": self.mode,
            "num_sequences": len(same),
            "num_identical": sum(same),
            "num_moved": len(self.moved),
            "context_tokens": sum(context),
            "cached_share": sum(cached) / sum(context),
            "num_bytes": self.counts.num_bytes,
            "pause_ms": 1e3 * self.counts.pause_s,
            "export_ms": 1e3 * self.counts.export_s,
            "wake_ms": 1e3 * self.wake_s,
            "resume_ms": 1e3 * median(self.resume_s),
            "resume_last_ms": 1e3 * max(self.resume_s),
        }


class Layouts:
    """The same GPUs twice: two engines, or one of twice their TP degree."""

    def __init__(self, config: TrainConfig, on_gpus: bool) -> None:
        low = config.rollout.tp_degree
        ranks = [tuple(range(i * low, (i + 1) * low)) for i in range(2)]
        both = merge_devices(ranks)
        self.low = [_engine(config, i, ranks[i] if on_gpus else ()) for i in range(2)]
        self.high = _engine(config, 2, both if on_gpus else (), tp_degree=2 * low)

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


def _engine(
    config: TrainConfig, index: int, devices: tuple[int, ...], tp_degree: int | None = None
) -> RayEngine:
    rollout = config.rollout.model_copy(update={"tp_degree": tp_degree or config.rollout.tp_degree})
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


def measure(args: Namespace, console: Console) -> BenchReport:
    for name in ("prompts", "laps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give at least 1")
    if not 0 < args.left <= 1:
        raise ValueError(f"--left {args.left}: give a share above 0 and up to 1")
    config = load_config(args.config)
    prompts = one_step.first_prompts(config, args.prompts)
    weights = one_step.first_weights(config, prompts)
    requests = one_step.step_requests(config, prompts)
    rows = tuple(asyncio.run(_measure(config, weights, requests, args, console)))
    return BenchReport(
        name="switch",
        figures=_figures(rows),
        rows=rows,
        command=args.command,
        versions=one_step.engine_versions(),
    )


def show(report: BenchReport, console: Console) -> None:
    times = ("pause_ms", "export_ms", "wake_ms", "resume_ms", "resume_last_ms")
    columns = ("identical", "moved", "tokens", "MB", *times)
    shown = (column.replace("_", " ").replace(" ms", "") for column in columns)
    table = plain_table("", *shown, text=("",))
    for mode in MODES:
        laps = [row for row in report.rows if row["mode"] == mode]
        table.add_row(
            mode,
            f"{report.figures[f'identical_{mode}']:.1%}",
            f"{_median(laps, 'num_moved'):.0f}",
            f"{_median(laps, 'context_tokens'):.0f}",
            f"{_median(laps, 'num_bytes') / 1e6:.1f}",
            *(f"{_median(laps, column):.1f}" for column in times),
        )
    console.print(table)
    console.print("times in ms")


async def _measure(
    config: TrainConfig,
    weights: PolicyWeights,
    requests: Sequence[RolloutRequest],
    args: Namespace,
    console: Console,
) -> list[dict]:
    num_gpus = 2 * config.rollout.tp_degree
    with ray_cluster("bench", num_gpus, "two engines") as gpus:
        if gpus and config.rollout.kv_cache_bytes is None:
            raise ValueError(
                "the engines of both layouts share the GPUs, and vLLM would take all of their "
                "memory for the first: give rollout.kv_cache_bytes"
            )
        layouts = Layouts(config, on_gpus=bool(gpus))
        try:
            await layouts.start()
            await layouts.begin(weights)
            expected = await _stay(layouts, requests)
            rows = []
            for lap in range(args.laps):
                # In turn, and not always the same one first.
                for mode in MODES[:: 1 if lap % 2 == 0 else -1]:
                    await layouts.begin(weights)
                    num_left = round(args.left * len(requests))
                    rows.append((await _switch(layouts, requests, mode, num_left)).row(expected))
                console.print(f"lap {lap + 1}/{args.laps}")
        finally:
            await layouts.shutdown()
    return rows


async def _stay(layouts: Layouts, requests: Sequence[RolloutRequest]) -> Finished:
    """Without a switch."""
    parts = await _submit(layouts, requests)
    finished = await asyncio.gather(
        *(_finish(engine, len(part)) for engine, part in zip(layouts.low, parts, strict=True))
    )
    return finished[0] | finished[1]


async def _switch(
    layouts: Layouts, requests: Sequence[RolloutRequest], mode: str, num_left: int
) -> SwitchLap:
    parts = await _submit(layouts, requests)
    pairs = list(zip(layouts.low, parts, strict=True))
    ids = [request.id for request in requests]
    await asyncio.gather(*(_until_left(engine, ids, num_left // 2) for engine in layouts.low))
    left = await asyncio.gather(
        *(engine.withdraw(ids, keep_kv=mode == "kv") for engine in layouts.low)
    )
    early = await asyncio.gather(
        *(
            _finish(engine, len(part) - len(leaving))
            for (engine, part), leaving in zip(pairs, left, strict=True)
        )
    )
    moved = [request for leaving in left for request in leaving]
    counts = [await engine.take_kv_counts() for engine in layouts.low]
    wake_s = await layouts.raise_tp()
    resume_s, first = await _next_tokens(layouts.high, moved)
    finished = await _go_on(layouts.high, moved)
    await layouts.return_to_base()
    for id, rollout in first.items():
        finished[id] = replace(finished[id], num_cached_tokens=rollout.num_cached_tokens)
    for some in early:
        finished |= some
    return SwitchLap(mode, moved, finished, _slower(counts), wake_s, resume_s)


async def _next_tokens(
    engine: RayEngine, moved: Sequence[RolloutRequest]
) -> tuple[list[float], Finished]:
    """One token of each, as nobody tells when a response that goes on has its first."""
    await engine.submit([replace(r, max_response_tokens=num_response_tokens(r) + 1) for r in moved])
    first = await _finish(engine, len(moved))
    return [r.finished_s - r.started_s for r in first.values()], first


async def _go_on(engine: RayEngine, moved: Sequence[RolloutRequest]) -> Finished:
    await engine.submit(moved)
    return await _finish(engine, len(moved))


async def _submit(
    layouts: Layouts, requests: Sequence[RolloutRequest]
) -> list[Sequence[RolloutRequest]]:
    parts = [requests[i::2] for i in range(2)]
    for engine, part in zip(layouts.low, parts, strict=True):
        await engine.submit(part)
    return parts


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
        finished |= {rollout.id: rollout for rollout in await fetch(told)}
    return finished


def _slower(counts: Sequence[KVCounts]) -> KVCounts:
    return KVCounts(
        num_bytes=sum(c.num_bytes for c in counts),
        pause_s=max(c.pause_s for c in counts),
        export_s=max(c.export_s for c in counts),
    )


def _median(rows: Sequence[Mapping], column: str) -> float:
    return median(row[column] for row in rows)


def _figures(rows: Sequence[dict]) -> dict[str, float]:
    figures: dict[str, float] = {}
    laps = {mode: [row for row in rows if row["mode"] == mode] for mode in MODES}
    for mode in MODES:
        identical = sum(row["num_identical"] for row in laps[mode])
        figures[f"identical_{mode}"] = identical / sum(r["num_sequences"] for r in laps[mode])
    for column in ("pause_ms", "export_ms", "wake_ms", "resume_ms", "resume_last_ms"):
        figures[column] = _median(laps["kv"], column)
    for column in ("resume_ms", "resume_last_ms"):
        figures[f"recompute_{column}"] = _median(laps["recompute"], column)
    for column in ("num_bytes", "num_moved", "context_tokens", "cached_share"):
        figures[column] = _median(laps["kv"], column)
    return figures
