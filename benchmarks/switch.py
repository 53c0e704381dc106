"""Unfinished responses go over to an engine of twice the TP degree, on real engines: what it takes,
and what it changes.

Two engines generate a few long responses. In the middle of them all are taken out and go on at one
engine that has the ranks of both, in turn

    recompute    their keys and values are computed again there
    kv           they are saved in shared memory and loaded there
    precopy      they are saved while the engines go on; only what came since is saved then

and all tokens must be as without a switch. On GPUs the two layouts share the same ones; on a CPU
they share the cores, so that only the parts of a switch mean something, not what comes after it.

    ahead_ms     before the switch, while the engines go on
    stop_ms      from the order to leave to a response's next token, the median one and the last one
    pause_ms     of that, until the engines have stopped, the slower one
    export_ms    until their ranks have written, the slower one
    wake_ms      until the higher layout has its GPUs
    resume_ms    from then to a response's next token, the median one

Without a CONFIG the model is a small one without training, whose keys and values take 16 kB a
token: beside them little else of it takes time, as with large ones.
"""

import asyncio
import random
import shutil
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
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
from schemas.keys import sample_key
from schemas.rollout import RequestId, Rollout, RolloutRequest, Split
from schemas.weights import PolicyWeights
from tasks.run.ray_cluster import ray_cluster

PACKAGES = one_step.PACKAGES
MODES = ("recompute", "kv", "precopy")
TIMES = ("ahead_ms", "stop_ms", "stop_last_ms", "pause_ms", "export_ms", "wake_ms", "resume_ms")
SHOWN = ("ahead_ms", "stop_ms", "pause_ms", "export_ms", "resume_ms")
_RESPONSE_TOKENS = 96
_TAKEN_AT = 32
"""Response tokens of all that are unfinished when they are taken out."""
_TOKENIZER = Path("infra/demo/model")
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

    async def save_ahead(self, ids: Sequence[RequestId]) -> None:
        saved = await asyncio.gather(*(engine.precopy(ids) for engine in self.low))
        await self.high.expect_kv([one for one in saved if one])

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


def add_arguments(parser: ArgumentParser, num_responses: int = 16) -> None:
    parser.add_argument("config", metavar="CONFIG", nargs="?", type=Path)
    parser.add_argument(
        "--contexts",
        type=_tokens,
        default=(512, 2048),
        metavar="N,N",
        help="prompt tokens of a response, in turn [default: 512,2048]",
    )
    parser.add_argument(
        "--responses",
        type=int,
        default=num_responses,
        metavar="N",
        help=f"[default: {num_responses}]",
    )
    parser.add_argument("--laps", type=int, default=3, metavar="N", help="of each [default: 3]")


def _tokens(text: str) -> tuple[int, ...]:
    given = tuple(int(number) for number in text.split(",") if number.strip().isdigit())
    if not given or min(given) < 1 or len(given) != text.count(",") + 1:
        raise ArgumentTypeError(f"{text!r} is no list of token counts: write, say, 512,2048")
    return given


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "responses", "laps")
    with TemporaryDirectory(prefix="refrain-bench-") as directory:
        rows = asyncio.run(_measure(config_of(args, Path(directory)), args, console))
    return _figures(rows, args.contexts), rows


def config_of(args: Namespace, directory: Path) -> TrainConfig:
    """The config that is given, or one of a model that is made in the directory."""
    config = load_config(args.config or _TOKENIZER.parent / "train.yaml")
    if args.config is None:
        model = config.model.model_copy(update={"path": _make_model(directory)})
        rollout = config.rollout.model_copy(update={"kv_cache_bytes": 2**29})
        config = config.model_copy(update={"model": model, "rollout": rollout})
    lengths = {"max_prompt_tokens": max(args.contexts), "max_response_tokens": _RESPONSE_TOKENS}
    return config.model_copy(update={"data": config.data.model_copy(update=lengths)})


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


def _make_model(path: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=4096,
        max_position_embeddings=2**16,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    for file in _TOKENIZER.glob("tokenizer*"):
        shutil.copyfile(file, path / file.name)
    return path


def requests_of(config: TrainConfig, context: int, num: int) -> list[RolloutRequest]:
    """Requests of a prompt each, which begin differently."""
    from transformers import AutoConfig

    drawn = random.Random(context)
    num_words = AutoConfig.from_pretrained(config.model.path).vocab_size
    return [
        RolloutRequest(
            id=RequestId(Split.TRAIN, 1, f"{context}-{i}", 0),
            prompt_token_ids=tuple(drawn.randrange(3, num_words) for _ in range(context)),
            sample_key=sample_key(config.seed, 1, Split.TRAIN, f"{context}-{i}", 0),
            max_response_tokens=_RESPONSE_TOKENS,
        )
        for i in range(num)
    ]


async def _measure(config: TrainConfig, args: Namespace, console: Console) -> list[Row]:
    pool = Wanted("two engines", 2 * config.rollout.tp_degree, "twice rollout.tp_degree")
    work = {context: requests_of(config, context, args.responses) for context in args.contexts}
    canaries = [request.prompt_token_ids[:64] for request in work[max(work)][:4]]
    weights = one_step.first_weights(config, canaries)
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
            return await _laps(layouts, weights, work, args.laps, console)
        finally:
            await layouts.shutdown()


async def _laps(
    layouts: Layouts,
    weights: PolicyWeights,
    work: dict[int, list[RolloutRequest]],
    num_laps: int,
    console: Console,
) -> list[Row]:
    """One more at first, which does not count: memory is taken then."""
    expected: Finished = {}
    for requests in work.values():
        await layouts.begin(weights)
        parts = [requests[i::2] for i in range(2)]
        for finished in await asyncio.gather(*map(generate, layouts.low, parts)):
            expected |= finished
    rows = []
    for lap in range(num_laps + 1):
        for context, requests in work.items():
            for mode in in_turn(MODES, lap):
                await layouts.begin(weights)
                row = await _switch(layouts, [requests[i::2] for i in range(2)], mode, expected)
                rows.append({"context": context, "lap": lap} | row)
        console.print(f"lap {lap}/{num_laps}")
    return [row for row in rows if row["lap"]]


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
    # One token of each, as nobody tells when a response that goes on has its first.
    begun = [replace(r, max_response_tokens=num_response_tokens(r) + 1) for r in moved]
    resumed_s = time.time()
    first = await generate(layouts.high, begun)
    num_early = [len(part) - len(leaving) for part, leaving in zip(parts, left, strict=True)]
    early = await asyncio.gather(*map(finish, layouts.low, num_early))
    counts = [await engine.take_kv_counts() for engine in layouts.low]
    finished = early[0] | early[1] | await generate(layouts.high, moved)
    await layouts.return_to_base()
    next_s = [rollout.finished_s for rollout in first.values()]
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
        "num_bytes_ahead": sum(c.num_bytes_ahead for c in counts),
        "ahead_ms": 1e3 * ahead_s,
        "stop_ms": 1e3 * (median(next_s) - ordered_s),
        "stop_last_ms": 1e3 * (max(next_s) - ordered_s),
        "pause_ms": 1e3 * max(c.pause_s for c in counts),
        "export_ms": 1e3 * max(c.export_s for c in counts),
        "wake_ms": 1e3 * wake_s,
        "resume_ms": 1e3 * (median(next_s) - resumed_s),
    }


async def generate(engine: RayEngine, requests: Sequence[RolloutRequest]) -> Finished:
    await engine.submit(requests)
    return await finish(engine, len(requests))


async def until_begun(engine: RayEngine, requests: Sequence[RolloutRequest]) -> None:
    """Events come together, too late for this."""
    ids = [request.id for request in requests]
    while min(map(num_response_tokens, await engine.copy(ids)), default=_TAKEN_AT) < _TAKEN_AT:
        await asyncio.sleep(0.02)


async def finish(engine: RayEngine, num: int) -> Finished:
    """Collect at least `num` finished rollouts."""
    finished: Finished = {}
    while len(finished) < num:
        told: Any = (await engine.next_events()).finished
        finished |= {rollout.id: rollout for rollout in await one_step.fetch(told)}
    return finished


def _identical(rows: Sequence[Row]) -> float:
    return sum(row["num_identical"] for row in rows) / sum(row["num_sequences"] for row in rows)


def _figures(rows: Sequence[Row], contexts: Sequence[int]) -> dict[str, float]:
    """Parts of a switch with the longest contexts; shares of the time stopped with each."""
    figures = {f"identical_{mode}": _identical(rows_with(rows, mode=mode)) for mode in MODES}
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
