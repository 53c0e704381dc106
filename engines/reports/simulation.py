"""Reports of a simulation: tables and pictures for people, JSON for machines. Each report carries
the label SIMULATION."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from refrain.engines.reports.tables import plain_table
from refrain.engines.simulate.cluster import summarise
from refrain.engines.simulate.pace import Interval
from refrain.schemas.simulate import PolicySetSummary, SimulatedStep

MAX_LISTED_ENGINES = 16
"""With more engines than this, the table shows only the least, median and largest idle share."""
PACKAGES = ("refrain", "numpy", "scipy")
"""Packages whose version may change a figure."""
SHARES = ("idle_share", "one_left_share", "last_alone_share")
Cell = str | int | float
NUM_BINS = 1200
"""Number of time bins of a step in its picture."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Figure that a paper prints for its baseline."""

    figure: str
    """Name of the simulated counterpart in `figures`."""
    printed: str
    """Value that the paper prints, with its place."""
    note: str
    """Remark on whether the simulation's settings were chosen with this figure in mind."""


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """Results of one trace on one cluster: every policy set on every step."""

    name: str
    results: Sequence[SimulatedStep]
    measured_s: Mapping[int, float]
    """Measured seconds of each step. Empty if the trace is not of a measured run."""
    facts: Sequence[Fact] = ()


@dataclass(frozen=True, slots=True)
class Ablation:
    """Speed-ups from the parts of a paper's technique, for the JSON report."""

    figures: Mapping[str, float]
    rows: Sequence[Mapping[str, Cell]]


def calibrate(outcome: SimulationOutcome) -> dict[str, tuple[float, float]]:
    """Return two medians for each policy set, over the measured steps: of |simulated - measured| /
    measured, and of simulated / measured. Empty without measured steps."""
    ratios: dict[str, list[float]] = {}
    for result in outcome.results:
        if measured_s := outcome.measured_s.get(result.step):
            ratios.setdefault(result.policy_set, []).append(result.step_s / measured_s)
    return {
        name: (median(abs(ratio - 1) for ratio in values), median(values))
        for name, values in ratios.items()
    }


def figures(outcome: SimulationOutcome) -> dict[str, float]:
    """Return figures by flat name. The prefix is `baseline_` for the first policy set, and the
    name of each other one."""
    values: dict[str, float] = {}
    for index, row in enumerate(summarise(outcome.results)):
        name = flat(row.policy_set) if index else "baseline"
        for field in ("step_s", "tokens_per_s", *SHARES):
            values[f"{name}_{field}"] = getattr(row, field)
        values[f"{name}_largest_idle_share"] = fmean(max(step.idle_shares) for step in row.steps)
        if index:
            values[f"{name}_speedup"] = row.speedup
    for policy_set, (error, ratio) in calibrate(outcome).items():
        values[f"median_error_{flat(policy_set)}"] = error
        values[f"median_ratio_{flat(policy_set)}"] = ratio
    return values


def to_json(
    name: str,
    outcomes: Sequence[SimulationOutcome],
    command: str,
    ablations: Sequence[Ablation] = (),
) -> str:
    """Return the JSON report, with one line for each row: for each step and policy set, and for
    each configuration of an ablation. The same simulation gives the same bytes."""
    several = len(outcomes) > 1
    found, rows = {}, []
    for outcome in outcomes:
        prefix = f"{outcome.name}_" if several else ""
        found |= {f"{prefix}{key}": short(value) for key, value in figures(outcome).items()}
        of_setting = {"setting": outcome.name} if several else {}
        rows += [of_setting | _row(result, outcome) for result in outcome.results]
    for ablation in ablations:
        found |= {key: short(value) for key, value in ablation.figures.items()}
        rows += [{key: short(value) for key, value in row.items()} for row in ablation.rows]
    return report_json(name, found, rows, command)


def report_json(
    name: str, figures: Mapping[str, Cell], rows: Sequence[Mapping[str, Cell]], command: str
) -> str:
    """Return the JSON of a simulation's figures and rows, with one line for each row."""
    parts = {
        "name": json.dumps(name),
        "simulation": "true",
        "figures": json.dumps(figures, indent=2).replace("\n", "\n  "),
        "rows": "[\n    " + ",\n    ".join(json.dumps(row) for row in rows) + "\n  ]",
        "command": json.dumps(command),
        "versions": json.dumps({package: version(package) for package in PACKAGES}),
    }
    return "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in parts.items()) + "\n}\n"


def print_outcome(outcome: SimulationOutcome, console: Console) -> None:
    rows = summarise(outcome.results)
    console.print(
        f"SIMULATION {outcome.name}, steps: {len(rows[0].steps)}, "
        f"speed-up over {rows[0].policy_set}"
    )
    console.print(_summary_table(rows))
    console.print("idle share by engine")
    console.print(_idle_table(rows))
    if calibration := calibrate(outcome):
        num_steps = len({r.step for r in outcome.results if r.step in outcome.measured_s})
        console.print(
            f"compared with the measured run, which places by `ranked`: median of {num_steps} steps"
        )
        table = _table("error", "simulated / measured")
        for name, (error, ratio) in calibration.items():
            table.add_row(name, f"{error:.1%}", f"{ratio:.3f}")
        console.print(table)
    console.print()


def print_facts(outcomes: Sequence[SimulationOutcome], console: Console) -> None:
    """Print the papers' figures beside the simulated ones, one line each."""
    for outcome in outcomes:
        found = figures(outcome)
        for fact in outcome.facts:
            text = f"{outcome.name}, {fact.figure}: {found[fact.figure]:.1%} here, paper"
            console.print(f"{text} {fact.printed}; {fact.note}", soft_wrap=True)


def batch_over_time(timelines: Sequence[Sequence[Interval]], step_s: float) -> np.ndarray:
    """Return the mean batch size of each engine in each of `NUM_BINS` equal parts of the step:
    [engines, bins]."""
    edges = np.linspace(0.0, step_s, NUM_BINS + 1)
    rows = []
    for intervals in timelines:
        times = np.array([(i.start_s, i.end_s) for i in intervals]).ravel()
        areas = np.array([(0.0, i.batch * (i.end_s - i.start_s)) for i in intervals]).ravel()
        grown = np.interp(edges, times, np.cumsum(areas)) if len(times) else np.zeros(len(edges))
        rows.append(np.diff(grown) / (step_s / NUM_BINS))
    return np.array(rows)


def draw_gantt(
    timelines: Sequence[Sequence[Interval]], step_s: float, path: Path, title: str
) -> None:
    """Draw a PNG with one line per engine. The colour is the batch size (logarithmic), white is
    idle time."""
    batches = batch_over_time(timelines, step_s)
    busy = np.ma.masked_less(batches, 1e-3)
    figure = Figure(figsize=(10, min(12.0, 2.0 + 0.25 * len(timelines))), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        np.ma.maximum(busy, 1.0),
        aspect="auto",
        interpolation="nearest",
        extent=(0.0, step_s, len(timelines) - 0.5, -0.5),
        norm=LogNorm(1.0, max(2.0, float(batches.max()))),
    )
    axes.set(xlabel="virtual seconds", ylabel="engine", title=title)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, label="requests in the batch")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _summary_table(rows: Sequence[PolicySetSummary]) -> Table:
    shares = ("idle", "one\nleft", "last\nalone")
    table = _table("step s", "tokens/s", "speed-up", *shares, "moved", "preempted")
    for row in rows:
        table.add_row(
            row.policy_set,
            f"{row.step_s:,.2f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.speedup:.2f}",
            *(f"{getattr(row, share):.1%}" for share in SHARES),
            f"{row.num_migrated:,}",
            f"{row.num_preempted:,}",
        )
    return table


def _idle_table(rows: Sequence[PolicySetSummary]) -> Table:
    num_engines = len(rows[0].idle_shares)
    listed = num_engines <= MAX_LISTED_ENGINES
    table = _table(*map(str, range(num_engines) if listed else ("least", "median", "largest")))
    for row in rows:
        shares = row.idle_shares
        shown = shares if listed else (min(shares), median(shares), max(shares))
        table.add_row(row.policy_set, *(f"{share:.0%}" for share in shown))
    return table


def _table(*columns: str) -> Table:
    return plain_table("policy set", *columns, text=("policy set",), min_width=10)


def _row(result: SimulatedStep, outcome: SimulationOutcome) -> dict[str, Cell]:
    row: dict[str, Cell] = {"step": result.step, "policy_set": result.policy_set}
    row |= {"num_rollouts": result.num_rollouts, "num_tokens": result.num_tokens}
    for field in ("step_s", "tokens_per_s", *SHARES):
        row[field] = short(getattr(result, field))
    row["largest_idle_share"] = short(max(result.idle_shares))
    row |= {"num_migrated": result.num_migrated, "num_preempted": result.num_preempted}
    if result.step in outcome.measured_s:
        row["measured_s"] = short(outcome.measured_s[result.step])
    return row


def short(value: Cell) -> Cell:
    """Round a float to six significant digits, which are the same on every machine."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def flat(policy_set: str) -> str:
    return re.sub(r"\W+", "_", policy_set)
