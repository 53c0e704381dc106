"""Compare drafters and window policies on the responses of a recorded run.

TRACE is a Parquet trace with token ids, or a run: its refrain.duckdb, its directory, or its name
under runs/. The bench generates every epoch again in lockstep (`benchmarks.lockstep`), except the
first, which has little to draft from. A prompt's drafts come from its last earlier group and its
rewards. A step's rollouts go in batches, in the order of the trace. The drafters are:

    none                 decoding without drafts
    ngram                vLLM's prompt lookup: 2 to 4 tokens match, 4 are drafted
    arctic               Arctic Inference's suffix decoding at depth 64 and factor 4
    histospec_paper      the history index, matches and windows of the paper (RhymeRL 5.3, 5.4)
    histospec_counts     as shipped, but without each sample's noise, and rewards do not matter
    histospec_device     as on vLLM's V2 runner, where the device drafts; always the longest draft
    histospec            as shipped, with the index that all prompts share; with a profile its gate
                         keeps the drafts that pay

With a profile the bench also predicts the rollout time of one engine: drafting and verifying the
mean draft of each pass. A drafter that was not profiled gets the draft times of one that was.
"""

from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.progress import track

from refrain.benchmarks.arctic import PACKAGE, find_cache_class
from refrain.benchmarks.drafters import Arctic, NGram, OnDevice, Shipped, Windows
from refrain.benchmarks.laps import Measured, Row, check_counts
from refrain.benchmarks.lockstep import (
    Batch,
    DraftTally,
    LockstepDrafter,
    PassTime,
    generate_again,
)
from refrain.engines.histospec.gate import ProfiledStepTimes
from refrain.engines.histospec.library import PromptHistory
from refrain.engines.histospec.window import AIMD
from refrain.engines.latency.fitted import FittedLatency
from refrain.engines.latency.profile_file import find_profile, read_profile
from refrain.engines.reports.tables import plain_table
from refrain.engines.simulate.counted_latency import CountedLatency
from refrain.engines.simulate.history import PAPER, check_token_ids
from refrain.engines.simulate.trace import Trace, from_store, read_trace
from refrain.flows.simulate_input import RUNS, find_trace
from refrain.schemas.bench import BenchReport
from refrain.schemas.drafting import DraftingConfig
from refrain.schemas.keys import sample_key
from refrain.schemas.latency import PointKind, Profile
from refrain.schemas.rollout import Split
from refrain.tasks.run.run_dir import CONFIG_FILE, read_config

FIRST_EPOCH = 5
"""First epoch, from 1, that counts in figures. From there on the history has settled."""
PACKAGES = ("refrain-rl", "numpy", "numba", PACKAGE)
RATES = ("acceptance_length", "acceptance_rate", "speculation_rate")
VARIANTS = {
    "histospec_counts": {"look_ahead": False},
    "histospec_device": {},
    "histospec": {},
}
"""Settings of `DraftingConfig` that differ from the defaults, for drafters that lack a part."""
Tallies = Mapping[tuple[str, int], DraftTally]
"""Tallies by drafter and epoch, from 1."""


@dataclass(frozen=True, slots=True)
class Times:
    """Times that a profile predicts for one TP degree."""

    profile: Profile
    tp_degree: int
    latency: CountedLatency

    def of(self, name: str) -> PassTime:
        known = sorted({str(point.drafter) for point in self.profile.of_kind(PointKind.DRAFT)})
        own = name.partition("_")[0]
        return PassTime(self.latency, self.tp_degree, own if own in known else known[0])


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a trace with token ids, or a run")
    add_engine(parser)
    parser.add_argument(
        "--epochs", metavar="LIST", help="from 1, as in 2,5,12 [default: all but the first]"
    )


def add_engine(parser: ArgumentParser) -> None:
    """Add arguments that describe the engine whose time is predicted."""
    parser.add_argument(
        "--profile", metavar="PATH", help="predict rollout times by it: a profile, or its name"
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="T", help="of the profile [default: 1]"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="of a batch [default: 256]"
    )


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "max_num_seqs")
    times = read_times(args.profile, args.tp) if args.profile else None
    trace = _read_trace(args.trace)
    epochs = _epochs(args.epochs, trace)
    return replayed(trace, epochs, _read_seed(args.trace), times, args.max_num_seqs, console)


def replayed(
    trace: Trace,
    epochs: Sequence[int],
    seed: int | None,
    times: Times | None,
    max_rows: int,
    console: Console,
) -> Measured:
    """Generate these epochs (from 1) with all drafters. `seed`: of the trace's samples, if
    known."""
    with TemporaryDirectory(prefix="refrain-bench-") as directory:
        epoch_steps = len(np.unique(trace.column("step")[trace.column("epoch") == 0]))
        drafters = _drafters(times, max_rows, Path(directory), epoch_steps)
        tallies = _replay(trace, epochs, drafters, times, max_rows, seed, console)
    if times and times.latency.complaint:
        console.print(f"warning: {times.latency.complaint}", style="yellow", soft_wrap=True)
    rows = [
        {"drafter": name, "epoch": epoch} | _values(tally, times is not None)
        for (name, epoch), tally in sorted(tallies.items(), key=lambda item: item[0][1])
    ]
    return _figures(tallies, times is not None), rows


def show(report: BenchReport, console: Console) -> None:
    figures = report.figures
    columns = {
        "acceptance_length": ("tokens\na pass", ".3f"),
        "acceptance_rate": ("accept-\ned", ".1%"),
        "speculation_rate": ("from\ndrafts", ".1%"),
        "num_draft_tokens": ("drafted", ",.0f"),
        "rollout_s": ("rollout\ns", ",.2f"),
        "speedup": ("speed-\nup", ".3f"),
        "draft_s": ("draft\ns", ",.1f"),
    }
    columns = {name: it for name, it in columns.items() if f"none_{name}" in figures}
    table = plain_table("drafter", *(title for title, _ in columns.values()), text=("drafter",))
    for name in dict.fromkeys(row["drafter"] for row in report.rows):
        cells = (format(figures[f"{name}_{key}"], spec) for key, (_, spec) in columns.items())
        table.add_row(str(name), *cells)
    if "arctic_speculation_rate" not in figures:
        table.add_row("arctic", f"{PACKAGE} is not installed")
    console.print(f"epochs {figures['first_epoch']} to {figures['last_epoch']}")
    console.print(table)


def read_times(name: str, tp_degree: int) -> Times:
    path = find_profile(name, RUNS)
    profile = read_profile(path)
    if not profile.of_kind(PointKind.VERIFY) or not profile.of_kind(PointKind.DRAFT):
        raise ValueError(
            f"{path} has no verify and draft points: make a profile without --windows ''"
        )
    latency = CountedLatency(profile)
    # This refuses a TP degree that was not profiled, before anything is replayed.
    latency.verify_s(tp_degree, 1, 1.0, 1)
    return Times(profile, tp_degree, latency)


def _read_trace(name: str) -> Trace:
    path = find_trace(name)
    is_store = path.suffix == ".duckdb"
    trace = from_store(path, token_ids=True) if is_store else read_trace(path)
    check_token_ids(trace)
    return trace


def _read_seed(name: str) -> int | None:
    """Return the seed of a run; None for a trace, which has no seed."""
    path = find_trace(name)
    is_run = path.suffix == ".duckdb" and (path.parent / CONFIG_FILE).exists()
    return read_config(path.parent).seed if is_run else None


def _epochs(text: str | None, trace: Trace) -> list[int]:
    """Return the epochs to generate again, from 1."""
    known = (np.unique(trace.column("epoch"))[1:] + 1).tolist()
    if not known:
        raise ValueError(
            f"{trace.source} has one epoch. Give a trace of at least two: the first has no "
            "history to draft from"
        )
    if text is None:
        return known
    try:
        wanted = {int(word) for word in text.split(",")}
    except ValueError:
        raise ValueError(f"--epochs {text!r} must list epochs, for example 2,5,12") from None
    if unknown := sorted(wanted - {1, *known}):
        raise ValueError(
            f"--epochs {text!r}: {trace.source} has no epoch {unknown[0]}; it has 1 to {known[-1]}"
        )
    return sorted(wanted)


def _drafters(
    times: Times | None, max_rows: int, directory: Path, epoch_steps: int
) -> dict[str, LockstepDrafter]:
    config = DraftingConfig()
    step_times = None
    if times:
        step_times = ProfiledStepTimes(FittedLatency(times.profile), times.tp_degree)
    cache_class = find_cache_class()
    return {
        "none": LockstepDrafter(),
        "ngram": NGram(),
        **({"arctic": Arctic(cache_class)} if cache_class else {}),
        "histospec_paper": Windows(AIMD(), PAPER),
        **{
            name: (OnDevice if name == "histospec_device" else Shipped)(
                config.model_copy(update=update),
                step_times,
                max_rows,
                directory / name,
                epoch_steps,
                rewarded=name != "histospec_counts",
            )
            for name, update in VARIANTS.items()
        },
    }


def _replay(
    trace: Trace,
    epochs: Sequence[int],
    drafters: Mapping[str, LockstepDrafter],
    times: Times | None,
    max_rows: int,
    seed: int | None,
    console: Console,
) -> Tallies:
    """Generate every batch with all drafters in turn."""
    pass_s = {name: times.of(name) if times else None for name in drafters}
    tallies: defaultdict[tuple[str, int], DraftTally] = defaultdict(DraftTally)
    steps = track(trace.steps, "drafting: step", console=console, transient=True)
    history: dict[str, PromptHistory] = {}
    for step in steps:
        rows = trace.step(step)
        epoch = int(rows.column("epoch")[0]) + 1
        groups = _groups(rows)
        drawn = _sample_keys(rows, seed)
        for batch in _batches(groups, history, drawn, max_rows) if epoch in epochs else ():
            for name, drafter in drafters.items():
                tallies[name, epoch] += generate_again(batch, drafter, pass_s[name])
        for drafter in drafters.values():
            drafter.learn(list(groups.values()))
        history |= groups
    return tallies


def _batches(
    groups: Mapping[str, PromptHistory],
    history: Mapping[str, PromptHistory],
    sample_keys: Mapping[str, Sequence[int]],
    max_rows: int,
) -> Iterator[Batch]:
    work = [(key, response) for key in groups for response in groups[key].responses]
    drawn = [sample_key for key in groups for sample_key in sample_keys.get(key, ())]
    past = {key: history[key] for key in groups if key in history}
    for first in range(0, len(work), max_rows):
        keys, responses = zip(*work[first : first + max_rows], strict=True)
        prompts = {key: groups[key].prompt_token_ids for key in keys}
        yield Batch(prompts, keys, responses, past, drawn[first : first + max_rows])


def _sample_keys(rows: Trace, seed: int | None) -> dict[str, list[int]]:
    """Return sample keys by prompt key, in the order of the trace; empty if the seed is unknown."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    columns = ("step", "prompt_key", "sample_index")
    for step, key, index in zip(*(rows.column(c).tolist() for c in columns), strict=True):
        if seed is not None:
            found[key].append(sample_key(seed, step, Split.TRAIN, key, index))
    return found


def _groups(rows: Trace) -> dict[str, PromptHistory]:
    """Return groups by prompt key, in the order of the trace. A missing reward counts as 0."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows.table.to_pylist():
        found[row["prompt_key"]].append(row)
    return {
        key: PromptHistory(
            key,
            group[0]["step"],
            np.array(group[0]["prompt_token_ids"], np.int32),
            [np.array(row["response_token_ids"], np.int32) for row in group],
            [row["reward"] or 0.0 for row in group],
        )
        for key, group in found.items()
    }


def _figures(tallies: Tallies, timed: bool) -> dict[str, int | float]:
    """Return figures over the late epochs; over all if there are no late ones."""
    epochs = sorted({epoch for _, epoch in tallies})
    late = [epoch for epoch in epochs if epoch >= FIRST_EPOCH] or epochs
    figures: dict[str, int | float] = {"first_epoch": late[0], "last_epoch": late[-1]}
    for name in dict.fromkeys(name for name, _ in tallies):
        tally = sum((tallies[name, epoch] for epoch in late), DraftTally())
        figures |= {f"{name}_{key}": value for key, value in _values(tally, timed).items()}
        if timed:
            figures[f"{name}_speedup"] = figures["none_rollout_s"] / tally.rollout_s
    return figures


def _values(tally: DraftTally, timed: bool) -> dict[str, int | float]:
    values: dict[str, int | float] = {name: getattr(tally, name) for name in RATES}
    values["num_draft_tokens"] = tally.num_drafted
    values |= {"rollout_s": tally.rollout_s} if timed else {}
    return values | {"draft_s": tally.draft_s}
