"""Rollouts on real engines: stock vLLM against refrain, interleaved, on a recorded run's work.

RUN is a finished run, its directory or its name under runs/, that kept a checkpoint for each epoch
asked for: `refrain train infra/demo/train.yaml name=long num_epochs=12 trainer.keep_checkpoints=99`
makes one. For each epoch all get the weights that the run had there, and generate the requests of
the epoch's second step (in the first one the samples of the first step are no history yet) on as
many engines as the run had:

    stock   vLLM as it comes: no speculation, its own sampling
    ngram   vLLM with n-gram drafts, its own sampling
    off     refrain with drafting off
    on      refrain with drafting on, and the run's history up to that step

Stock samples other tokens, so what is compared is tokens per second. The tokens of off and on must
be the same, and those that the run recorded. Medians; every lap starts with a cold prefix cache.
Engines are started anew for each round: one process is a few per cent faster than another of its
kind.

`saved_predicted_over_measured` tests what a run's timeline says that drafting saved: the same said
of the laps of on, by what its engines measured, over how much longer those of off took; of the
epochs with drafts the one farthest from 1.
"""

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from rich.console import Console

from benchmarks import one_step
from benchmarks.laps import Measured, Row, check_counts, in_turn, median_of, rows_with
from benchmarks.stock import StockEngine, StockNgramEngine
from engines.accounting.savings import MEASURED, acted, engine_costs, step_savings
from engines.accounting.step_requests import Stay, StepRequest
from engines.gpus.placement import Wanted
from engines.inference.engine.ray_engine import RayEngine
from engines.inference.engine.vllm_engine import VLLMEngine
from engines.learn.checkpoint import checkpoints_dir
from engines.reports.tables import plain_table
from engines.rollout.coordinator import Coordinator
from engines.store.store import Store, open_read_only
from flows.simulate_input import find_trace
from schemas.bench import BenchReport
from schemas.config import TrainConfig
from schemas.data import Prompt
from schemas.drafting import DraftingConfig
from schemas.rollout import RequestId, RolloutRequest, Split
from schemas.weights import PolicyWeights
from tasks.run.gpus import wanted_by_engines
from tasks.run.ray_cluster import ray_cluster
from tasks.run.run_dir import read_config

PACKAGES = one_step.PACKAGES
GROUPS = (("stock", "off", "on"), ("stock", "ngram"))
"""Engines that run interleaved: as many processes as fit a small machine's memory."""
CLASSES = {"stock": StockEngine, "ngram": StockNgramEngine, "off": VLLMEngine, "on": VLLMEngine}


@dataclass(frozen=True)
class Work:
    """One step of the run."""

    epoch: int
    """Number, from 1."""
    step: int
    weights: PolicyWeights
    assignments: Sequence[tuple[int, RolloutRequest]]
    recorded: dict[RequestId, Sequence[int]]
    """Tokens that the run got."""


@dataclass(frozen=True)
class EngineLap:
    name: str
    group: int
    """Index in `GROUPS`: it ran in turn with the others there."""
    work: Work
    lap: one_step.Lap

    def row(self) -> Row:
        counts = self.lap.counts
        return {
            "engine": self.name,
            "group": self.group,
            "epoch": self.work.epoch,
            "seconds": self.lap.seconds,
            "num_tokens": counts["num_tokens"],
            "tokens_per_s": counts["num_tokens"] / self.lap.seconds,
            "num_draft_tokens": counts["num_draft_tokens"],
            "num_accepted_tokens": counts["num_accepted_tokens"],
            "saved_s": _saved_s(self.lap),
        }


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a finished run: its directory or name")
    parser.add_argument("--epochs", default="1,2,5,10", metavar="LIST", help="[default: 1,2,5,10]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="[default: 3]")
    parser.add_argument(
        "--laps", type=int, default=3, metavar="N", help="of each engine in a round [default: 3]"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="of each engine [default: the run's]"
    )
    parser.add_argument(
        "--engines", type=int, metavar="N", help="[default: as many as the run had]"
    )


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "laps", "rounds")
    file = find_trace(args.run)
    config = _config(file.parent, args)
    epochs = [int(word) for word in args.epochs.split(",")]
    laps: list[EngineLap] = []
    with open_read_only(file) as store:
        steps = {epoch: _step_of(store, config, epoch) for epoch in epochs}
        works = [_work(store, config, epoch, step) for epoch, step in steps.items()]
        with TemporaryDirectory(prefix="refrain-bench-") as directory:
            for number in range(args.rounds):
                console.print(f"round {number + 1}/{args.rounds}")
                for group in range(len(GROUPS)):
                    step = (works, store, config, Path(directory), args.laps, console)
                    laps += asyncio.run(_measure_group(group, *step))
    rows = [lap.row() for lap in laps]
    exact = [lap for lap in laps if lap.name in ("off", "on")]
    same = [lap.work.recorded[id] == t for lap in exact for id, t in lap.lap.tokens.items()]
    return _figures(rows, epochs) | {"identical": fmean(same)}, rows


def show(report: BenchReport, console: Console) -> None:
    columns = ("epoch", "engine", "tokens/s", "over stock", "accepted", "from drafts")
    table = plain_table(*columns, text=("engine",))
    for epoch in dict.fromkeys(row["epoch"] for row in report.rows):
        for name in CLASSES:
            figures, end = report.figures, f"{name}_epoch_{epoch}"
            table.add_row(
                str(epoch),
                name,
                f"{figures[f'tokens_per_s_{end}']:,.0f}",
                f"{figures[f'speedup_{end}']:.2f}",
                f"{figures[f'acceptance_rate_{end}']:.1%}",
                f"{figures[f'speculation_rate_{end}']:.1%}",
            )
    console.print(table)
    console.print(f"identical to the run, off and on: {report.figures['identical']:.1%}")
    if ratio := report.figures.get("saved_predicted_over_measured"):
        console.print(f"seconds said to be saved over those saved, farthest from 1: {ratio:.2f}")


async def _measure_group(
    group: int,
    works: Sequence[Work],
    store: Store,
    config: TrainConfig,
    directory: Path,
    num_laps: int,
    console: Console,
) -> list[EngineLap]:
    names = GROUPS[group]
    wanted = [
        Wanted(f"{name}, {one.what}", one.num_gpus, one.setting)
        for name in names
        for one in wanted_by_engines(config)
    ]
    laps: list[EngineLap] = []
    with ray_cluster("bench", wanted) as placement:
        engine_gpus = config.rollout.tp_degree if placement.num_gpus else 0
        coordinators = {
            name: Coordinator(_engines(name, config, directory, engine_gpus)) for name in names
        }
        try:
            for coordinator in coordinators.values():
                await coordinator.start()
            for work in works:
                _write_history(store, work, directory)
                for lap in range(num_laps + 1):
                    for name in in_turn(names, lap):
                        step = (coordinators[name], work.weights, work.assignments)
                        measured = EngineLap(name, group, work, await one_step.roll_out(*step))
                        # The first lap of an engine is its warm-up.
                        laps += [measured] if lap else []
                    console.print(f"epoch {work.epoch}, {', '.join(names)}: lap {lap}/{num_laps}")
        finally:
            for coordinator in coordinators.values():
                await coordinator.shutdown()
    return laps


def _saved_s(lap: one_step.Lap) -> float:
    """Seconds that drafting saved, as the timeline of a run would say; 0 without any."""
    shares = lap.outcome.shares
    requests = [
        StepRequest(
            id=rollout.id,
            stays=(Stay(rollout.engine, rollout.started_s, rollout.finished_s),),
            finish_reason=str(rollout.finish_reason),
            step_tokens=rollout.num_tokens,
            response_tokens=rollout.num_tokens,
            prompt_tokens=len(rollout.request.prompt_token_ids),
            num_draft_tokens=rollout.generated.num_draft_tokens,
            num_accepted_tokens=rollout.generated.num_accepted_tokens,
        )
        for rollout in lap.rollouts
    ]
    if not acted(requests, ()) or not any(share.drafting.step_costs for share in shares):
        return 0.0
    savings = step_savings(requests, (), engine_costs(requests, shares, {}, None), MEASURED)
    return savings.each[0].saved_s if savings else 0.0


def _engines(name: str, config: TrainConfig, directory: Path, num_gpus: int) -> list[RayEngine]:
    drafting = DraftingConfig() if name == "on" else DraftingConfig(enabled=False)
    engine = config.engine.model_copy(update={"drafting": drafting, "history_dir": directory})
    return [
        RayEngine(i, engine, num_gpus, CLASSES[name]) for i in range(config.rollout.num_engines)
    ]


def _config(run_dir: Path, args: Namespace) -> TrainConfig:
    config = read_config(run_dir)
    changes = {"max_num_seqs": args.max_num_seqs, "num_engines": args.engines}
    given = {name: value for name, value in changes.items() if value is not None}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=given)})


def _step_of(store: Store, config: TrainConfig, epoch: int) -> int:
    """The second step of an epoch, the first where there is but one."""
    steps = [report.step for report in store.steps() if report.epoch == epoch - 1]
    if not steps:
        raise ValueError(f"--epochs: {config.run_dir} has no epoch {epoch}")
    return steps[min(1, len(steps) - 1)]


def _work(store: Store, config: TrainConfig, epoch: int, step: int) -> Work:
    plan = store.plan(Split.TRAIN, step)
    assert plan is not None
    columns = ("prompt_key", "sample_index", "response_token_ids")
    rows = store.rollouts(Split.TRAIN, step, columns).to_pylist()
    texts = store.prompts()
    prompts = [Prompt(g.prompt_key, texts[g.prompt_key], "", "") for g in plan.groups]
    engines = {g.prompt_key: g.engine % config.rollout.num_engines for g in plan.groups}
    requests = one_step.step_requests(config, prompts, step)
    recorded = {
        RequestId(Split.TRAIN, step, row["prompt_key"], row["sample_index"]): row[
            "response_token_ids"
        ]
        for row in rows
    }
    assignments = [(engines[request.id.prompt_key], request) for request in requests]
    return Work(epoch, step, _weights(config, step - 1), assignments, recorded)


def _weights(config: TrainConfig, policy_version: int) -> PolicyWeights:
    model = checkpoints_dir(config) / f"global_step_{policy_version}" / "model"
    file = (model if policy_version else config.model.path) / "model.safetensors"
    if not file.exists():
        raise ValueError(
            f"{file} is gone, and with it the policy of that step: make the run with "
            "trainer.keep_checkpoints=1000, or ask for other --epochs"
        )
    return PolicyWeights(policy_version, file.read_bytes(), ())


def _write_history(store: Store, work: Work, directory: Path) -> None:
    """The indexes that the run had before the step, and no others."""
    from engines.histospec.library import IndexLibrary
    from engines.histospec.workers import histories

    for path in directory.iterdir():
        path.unlink()
    keys = sorted({request.id.prompt_key for _, request in work.assignments})
    steps = store.last_steps(Split.TRAIN, keys, work.step)
    rows = store.index_rows(Split.TRAIN, steps)
    IndexLibrary(directory, DraftingConfig()).add(histories(rows))


def _figures(rows: Sequence[Row], epochs: Sequence[int]) -> dict[str, float]:
    """Speed-ups are over the stock laps that ran in turn with an engine's own."""
    figures: dict[str, float] = {}
    for epoch in epochs:
        for group, names in enumerate(GROUPS):
            laps = rows_with(rows, group=group, epoch=epoch)
            stock = median_of(laps, "tokens_per_s", engine="stock")
            for name in names[group:]:
                own = rows_with(laps, engine=name)
                end = f"{name}_epoch_{epoch}"
                figures |= {f"{key}_{end}": value for key, value in _of_engine(own, stock).items()}
        figures[f"speedup_epoch_{epoch}"] = figures[f"speedup_on_epoch_{epoch}"]
    return figures | _saved_figures(rows, epochs)


def _saved_figures(rows: Sequence[Row], epochs: Sequence[int]) -> dict[str, float]:
    """Ratio of every epoch with drafts, and the one farthest from 1."""
    ratios = {}
    for epoch in epochs:
        on, off = (rows_with(rows, group=0, epoch=epoch, engine=name) for name in ("on", "off"))
        if any(row["num_draft_tokens"] for row in on):
            longer_s = median_of(off, "seconds") - median_of(on, "seconds")
            ratio = median_of(on, "saved_s") / longer_s
            ratios[f"saved_predicted_over_measured_epoch_{epoch}"] = ratio
    if not ratios:
        return {}
    farthest = max(ratios.values(), key=lambda ratio: abs(log(ratio)) if ratio > 0 else inf)
    return ratios | {"saved_predicted_over_measured": farthest}


def _of_engine(laps: Sequence[Row], stock: float) -> dict[str, float]:
    counted = ("num_draft_tokens", "num_accepted_tokens", "num_tokens")
    drafted, accepted, tokens = (sum(row[column] for row in laps) for column in counted)
    speed = median_of(laps, "tokens_per_s")
    return {
        "tokens_per_s": speed,
        "speedup": speed / stock,
        "acceptance_rate": accepted / max(1, drafted),
        "speculation_rate": accepted / tokens,
    }
