"""Draft models that draft ahead of verification, on real engines: accepted and wasted tokens.

CONFIG names a policy, a data set and at least one draft model (`specactor.draft_models`); the bench
uses the first. Two engines generate the requests of one step in several modes, in turn:

    none                    no drafts
    coupled, decoupled      the drafter pauses while a window is verified, or drafts on
    best-of-N               decoupled, and the engine that is idle first races other drafters
    history                 drafts from an earlier epoch of the same policy
    fused                   history and draft model: verify the draft that is expected to gain more

Draft models use the noise of the responses (shared) or noise of their own (independent). All modes
must generate the same tokens. The drafted share is verified draft tokens / all tokens, including
those of steps without drafts. The acceptance is accepted / verified draft tokens. No step waits for
drafts, so the drafted share shows how far ahead the drafter is: if a step of the engine takes as
long as r steps of the drafter, at most (r - 1) / r of the tokens are drafted. Waste is what a
failed draft threw away. With a window of w that is at most 2w - 1 tokens decoupled, and w coupled.
Engine 1 gets every eighth request, so that it is idle early. r is measured: seconds of a step of
engine 0 / seconds of a step of the drafter, including the time in which it receives verified
tokens.

Seconds on a CPU mean little if drafters and engines share its cores. With `--split-cores` the
drafters have one half of the cores in every mode, and everything else has the other half. Plain
decoding then has only the engines' half. On GPUs each would have cards of its own.
"""

import asyncio
import os
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import psutil
from rich.console import Console

from refrain.benchmarks import one_step
from refrain.benchmarks.cores import halves, only, pin
from refrain.benchmarks.laps import Measured, Row, check_counts, in_turn, median_of, rows_with
from refrain.engines.gpus.placement import Wanted
from refrain.engines.histospec.index import HistoryIndex, build_index
from refrain.engines.histospec.index_file import index_path, write_index
from refrain.engines.inference.drafting.drafters import Drafters
from refrain.engines.inference.drafting.vllm_drafter import VLLMDrafter
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.reports.tables import plain_table
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.specactor.best_of_n import BestOfN
from refrain.flows.config_file import load_config
from refrain.schemas.bench import BenchReport
from refrain.schemas.config import TrainConfig
from refrain.schemas.counts import StreamCounts
from refrain.schemas.drafting import NGRAM
from refrain.schemas.rollout import DraftSetting, Rollout, RolloutRequest
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.run.ray_cluster import ray_cluster

PACKAGES = one_step.PACKAGES
NOISES = ("shared", "independent")
DRAFTERS = "a drafter"
RACED = 8
"""Requests that the racing engine takes at most."""
EARLY = 8
"""One request in this many goes to the engine that should be idle early."""


@dataclass(frozen=True)
class Mode:
    name: str
    setting: DraftSetting | None
    races: tuple[DraftSetting, ...] = ()
    """Drafters that an idle engine races with."""
    history: bool = False
    """Whether prompts have an earlier epoch."""

    @property
    def drafter(self) -> str:
        """Name of the drafter that requests begin with; empty: none."""
        return self.setting.drafter if self.setting else ""


@dataclass(frozen=True)
class DraftedLap:
    mode: Mode
    lap: one_step.Lap
    counts: StreamCounts

    def row(self) -> Row:
        return {
            "mode": self.mode.name,
            "noise": self.mode.drafter or None,
            "seconds": self.lap.seconds,
            **self.lap.counts,
            "num_drafted_ahead": self.counts.num_drafted,
            "num_wasted_tokens": self.counts.num_wasted,
            "num_failures": self.counts.num_failures,
            "max_wasted_tokens": self.counts.max_wasted,
            "engine_step_s": self._engine_step_s,
            "drafter_step_s": self.counts.work_s / max(1, self.counts.num_steps),
            "num_raced": self.lap.outcome.moves.num_raced,
        }

    @property
    def _engine_step_s(self) -> float:
        """Seconds of a step of the engine with the most requests."""
        share = next(share for share in self.lap.outcome.shares if share.engine == 0)
        return share.busy_s / share.drafting.num_steps


class Earlier:
    """Index files of an earlier epoch, which can be hidden."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._indexes: dict[str, HistoryIndex] = {}

    def keep(self, lap: DraftedLap) -> None:
        groups: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in lap.lap.rollouts:
            groups[rollout.id.prompt_key].append(rollout)
        for key, group in groups.items():
            responses = [rollout.generated.token_ids for rollout in group]
            prompt = group[0].request.prompt_token_ids
            self._indexes[key] = build_index(prompt, responses, [1.0] * len(group))

    def show(self, there: bool) -> None:
        for key, index in self._indexes.items():
            path = index_path(self._directory, key)
            if there:
                write_index(index, key, path)
            else:
                path.unlink(missing_ok=True)


def add_arguments(parser: ArgumentParser) -> None:
    one_step.add_arguments(parser, "infra/demo/decoupled.yaml")
    parser.add_argument(
        "--window",
        type=int,
        default=4,
        metavar="W",
        help="draft tokens per verification [default: 4]",
    )
    parser.add_argument(
        "--split-cores", action="store_true", help="reserve half of the cores for drafters"
    )


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "window", "prompts", "laps")
    config = load_config(args.config)
    if not config.specactor.draft_models:
        raise ValueError(f"{args.config} names no draft model: add specactor.draft_models")
    if args.split_cores:
        halves(DRAFTERS)
    work = one_step.first_step(config, args.prompts)
    laps = asyncio.run(_measure(config, *work, args, console))
    rows = [lap.row() for lap in laps]
    plain = next(lap.lap.tokens for lap in laps if lap.mode.setting is None)
    same = [plain[id] == tokens for lap in laps for id, tokens in lap.lap.tokens.items()]
    return _figures(rows) | {"identical": fmean(same)}, rows


def show(report: BenchReport, console: Console) -> None:
    words = ("mode", "noise")
    numbers = ("drafted", "accepted", "tokens a pass", "wasted", "at once", "r")
    table = plain_table(*words, *numbers, "seconds", text=words)
    for mode, noise in dict.fromkeys((row["mode"], row["noise"]) for row in report.rows):
        laps = rows_with(report.rows, mode=mode, noise=noise)
        total = _totals(laps)
        drafted, accepted = total["num_draft_tokens"], total["num_accepted_tokens"]
        passes, ahead = total["num_verifications"], total["num_drafted_ahead"]
        table.add_row(
            mode,
            noise or "",
            f"{drafted / total['num_tokens']:.1%}" if drafted else "",
            f"{accepted / drafted:.1%}" if drafted else "",
            f"{1 + accepted / passes:.2f}" if passes else "1.00",
            f"{total['num_wasted_tokens'] / ahead:.1%}" if ahead else "",
            str(max(row["max_wasted_tokens"] for row in laps)) if ahead else "",
            f"{_pace(laps):.2f}" if ahead else "",
            f"{median_of(laps, 'seconds'):.2f}",
        )
    console.print(table)
    console.print(f"identical tokens in all modes: {report.figures['identical']:.1%}")


async def _measure(
    config: TrainConfig,
    weights: PolicyWeights,
    requests: Sequence[RolloutRequest],
    args: Namespace,
    console: Console,
) -> list[DraftedLap]:
    model = config.engine.drafter_processes[0]
    processes = [
        model.model_copy(update={"name": noise, "shared_noise": noise == "shared"})
        for noise in NOISES
    ]
    laps: list[DraftedLap] = []
    others, own = halves(DRAFTERS) if args.split_cores else (os.sched_getaffinity(0), None)
    wanted = [Wanted(f"process {i}", 1, "two engines and two drafters") for i in range(4)]
    with (
        TemporaryDirectory(prefix="refrain-bench-") as directory,
        only(others),
        ray_cluster("bench", wanted) as placement,
    ):
        engine = config.engine.model_copy(update={"history_dir": Path(directory)})
        earlier = Earlier(Path(directory))
        per_process = 1 if placement.num_gpus else 0
        engines = [RayEngine(i, engine, config.rollout.tp_degree * per_process) for i in range(2)]
        drafters = Drafters(processes, engines, console.print, per_process, max_restarts=0)
        try:
            await asyncio.gather(drafters.start(), *(one.start() for one in engines))
            if own:
                family = psutil.Process().children(recursive=True)
                assert pin(family, VLLMDrafter.__name__, own) == len(processes)
            other = [replace(one, sample_key=one.sample_key + 1) for one in requests]
            plain = _modes(args.window)[0]
            earlier.keep(await _lap(plain, engines, drafters, weights, other))
            for lap in range(args.laps):
                # An engine ends its last drafts in the first step of the next lap: a short lap
                # without drafts keeps that out of the measured ones.
                await _lap(plain, engines, drafters, weights, requests[:EARLY])
                for mode in in_turn(_modes(args.window), lap):
                    earlier.show(mode.history)
                    laps.append(await _lap(mode, engines, drafters, weights, requests))
                console.print(f"lap {lap + 1}/{args.laps}")
        finally:
            await drafters.shutdown()
            for one in engines:
                await one.shutdown()
    return laps


def _modes(window: int) -> list[Mode]:
    drafted = [
        Mode(name, DraftSetting(noise, window, coupled=name == "coupled"))
        for noise in NOISES
        for name in ("coupled", "decoupled")
    ]
    begun = DraftSetting("shared", window, coupled=False)
    races = (DraftSetting(NGRAM, window), DraftSetting("independent", window, coupled=False))
    return [
        Mode("none", None),
        *drafted,
        Mode("best-of-N", begun, races),
        Mode("history", None, history=True),
        Mode("fused", begun, history=True),
    ]


async def _lap(
    mode: Mode,
    engines: Sequence[RayEngine],
    drafters: Drafters,
    weights: PolicyWeights,
    requests: Sequence[RolloutRequest],
) -> DraftedLap:
    policies = [BestOfN(mode.races, initial=mode.drafter, max_batch=RACED)] if mode.races else []
    coordinator = Coordinator(engines, policies)
    await drafters.take_counts()
    assignments = [
        (int(i % EARLY == 0), replace(request, drafting=mode.setting))
        for i, request in enumerate(requests)
    ]
    lap = await one_step.roll_out(coordinator, weights, assignments)
    counts = (await drafters.take_counts()).get(mode.drafter, StreamCounts())
    return DraftedLap(mode, lap, counts)


def _totals(rows: Sequence[Row]) -> dict[str, int]:
    return {name: sum(row[name] for row in rows) for name in rows[0] if name.startswith("num_")}


def _pace(laps: Sequence[Row]) -> float:
    return median_of(laps, "engine_step_s") / median_of(laps, "drafter_step_s")


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for noise in NOISES:
        total = _totals(rows_with(rows, mode="coupled", noise=noise))
        acceptance = total["num_accepted_tokens"] / max(1, total["num_draft_tokens"])
        figures[f"{noise}_noise_acceptance"] = acceptance
    figures["max_wasted_tokens"] = max(row["max_wasted_tokens"] for row in rows)
    ahead = _totals(rows_with(rows, mode="decoupled", noise="shared"))
    figures["wasted_share"] = ahead["num_wasted_tokens"] / max(1, ahead["num_drafted_ahead"])
    figures["drafted_share"] = ahead["num_draft_tokens"] / ahead["num_tokens"]
    for name in ("history", "decoupled", "fused"):
        own = [row for row in rows_with(rows, mode=name) if row["noise"] in (None, "shared")]
        total = _totals(own)
        figures[f"{name}_accepted_share"] = total["num_accepted_tokens"] / total["num_tokens"]
        figures[f"{name}_seconds"] = median_of(own, "seconds")
    figures["pace"] = _pace(rows_with(rows, mode="decoupled", noise="shared"))
    figures["seconds"] = median_of(rows, "seconds", mode="decoupled", noise="shared")
    figures["plain_seconds"] = median_of(rows, "seconds", mode="none")
    return figures
