"""Result of a simulation: tables for people, JSON for machines. Always labelled SIMULATION."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from engines.reports.tables import plain_table
from engines.simulate.cluster import summarise
from schemas.simulate import PolicySetSummary, SimulatedStep

MAX_LISTED_ENGINES = 16
"""Engines up to which each is listed; of more, only the least, median and largest idle share."""
PACKAGES = ("refrain", "numpy", "scipy")
"""Packages on whose version a figure may depend."""
SHARES = ("idle_share", "one_left_share", "last_alone_share")


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure that a paper prints of its baseline."""

    figure: str
    """The simulated counterpart, as `figures` names it."""
    printed: str
    """Value that the paper prints, and where."""
    note: str
    """Remark on how far the settings are free of the figure."""


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """One trace on one cluster, every policy set on every step."""

    name: str
    results: Sequence[SimulatedStep]
    measured_s: Mapping[int, float]
    """Measured seconds by step, where the trace is of a run that took so long."""
    facts: Sequence[Fact] = ()


@dataclass(frozen=True, slots=True)
class Ablation:
    """Gains of a paper's parts, as JSON has them."""

    figures: Mapping[str, float]
    rows: Sequence[Mapping[str, str | int | float]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """A policy set against the run that the trace is of; medians over its steps."""

    error: float
    """Median of |simulated - measured| / measured."""
    ratio: float
    """Median of simulated / measured."""


def calibrate(outcome: SimulationOutcome) -> dict[str, Calibration]:
    """Calibration by policy set; empty when no step was measured."""
    ratios: dict[str, list[float]] = {}
    for result in outcome.results:
        if measured_s := outcome.measured_s.get(result.step):
            ratios.setdefault(result.policy_set, []).append(result.step_s / measured_s)
    return {
        name: Calibration(median(abs(ratio - 1) for ratio in values), median(values))
        for name, values in ratios.items()
    }


def figures(outcome: SimulationOutcome) -> dict[str, float]:
    """Flat names: the first policy set is `baseline_`, the others go by their names."""
    values: dict[str, float] = {}
    for index, row in enumerate(summarise(outcome.results)):
        name = _flat(row.policy_set) if index else "baseline"
        own = [result for result in outcome.results if result.policy_set == row.policy_set]
        for field in ("step_s", "tokens_per_s", *SHARES):
            values[f"{name}_{field}"] = getattr(row, field)
        values[f"{name}_largest_idle_share"] = fmean(max(step.idle_shares) for step in own)
        if index:
            values[f"{name}_speedup"] = row.speedup
    for policy_set, calibration in calibrate(outcome).items():
        values[f"median_error_{_flat(policy_set)}"] = calibration.error
        values[f"median_ratio_{_flat(policy_set)}"] = calibration.ratio
    return values


def to_json(
    name: str,
    outcomes: Sequence[SimulationOutcome],
    command: str,
    ablations: Sequence[Ablation] = (),
) -> str:
    """The same bytes for the same simulation; a row for each step and policy set, and for each
    configuration of an ablation, on a line."""
    several = len(outcomes) > 1
    found, rows = {}, []
    for outcome in outcomes:
        prefix = f"{outcome.name}_" if several else ""
        found |= {f"{prefix}{key}": _short(value) for key, value in figures(outcome).items()}
        of_setting = {"setting": outcome.name} if several else {}
        rows += [of_setting | _row(result, outcome) for result in outcome.results]
    for ablation in ablations:
        found |= {key: _short(value) for key, value in ablation.figures.items()}
        rows += [
            {
                key: _short(value) if isinstance(value, float) else value
                for key, value in row.items()
            }
            for row in ablation.rows
        ]
    parts = {
        "name": json.dumps(name),
        "simulation": "true",
        "figures": json.dumps(found, indent=2).replace("\n", "\n  "),
        "rows": "[\n    " + ",\n    ".join(json.dumps(row) for row in rows) + "\n  ]",
        "command": json.dumps(command),
        "versions": json.dumps({package: version(package) for package in PACKAGES}),
    }
    return "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in parts.items()) + "\n}\n"


def print_outcome(outcome: SimulationOutcome, console: Console) -> None:
    rows = summarise(outcome.results)
    console.print(
        f"SIMULATION {outcome.name}, steps: {rows[0].num_steps}, speed-up over {rows[0].policy_set}"
    )
    console.print(_summary_table(rows))
    console.print("idle share by engine")
    console.print(_idle_table(outcome.results))
    if calibration := calibrate(outcome):
        num_steps = len({r.step for r in outcome.results if r.step in outcome.measured_s})
        console.print(
            f"against the run itself, which places by `ranked`: median of {num_steps} steps"
        )
        console.print(_calibration_table(calibration))
    console.print()


def print_facts(outcomes: Sequence[SimulationOutcome], console: Console) -> None:
    """Print what the papers say beside what was simulated, on lines of their own."""
    for outcome in outcomes:
        found = figures(outcome)
        for fact in outcome.facts:
            text = f"{outcome.name}, {fact.figure}: {found[fact.figure]:.1%} here, paper"
            console.print(f"{text} {fact.printed}; {fact.note}", soft_wrap=True)


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


def _idle_table(results: Sequence[SimulatedStep]) -> Table:
    """Per engine, weighted by seconds."""
    listed = len(results[0].idle_shares) <= MAX_LISTED_ENGINES
    columns = range(len(results[0].idle_shares)) if listed else ("least", "median", "largest")
    table = _table(*map(str, columns))
    by_set: dict[str, list[SimulatedStep]] = {}
    for result in results:
        by_set.setdefault(result.policy_set, []).append(result)
    for name, steps in by_set.items():
        seconds = [step.step_s for step in steps]
        by_engine = zip(*(step.idle_shares for step in steps), strict=True)
        shares = [fmean(engine, weights=seconds) for engine in by_engine]
        shown = shares if listed else (min(shares), median(shares), max(shares))
        table.add_row(name, *(f"{share:.0%}" for share in shown))
    return table


def _calibration_table(calibration: Mapping[str, Calibration]) -> Table:
    table = _table("error", "simulated / measured")
    for name, row in calibration.items():
        table.add_row(name, f"{row.error:.1%}", f"{row.ratio:.3f}")
    return table


def _table(*columns: str) -> Table:
    return plain_table("policy set", *columns, text=("policy set",), min_width=10)


def _row(result: SimulatedStep, outcome: SimulationOutcome) -> dict[str, str | int | float]:
    row: dict[str, str | int | float] = {"step": result.step, "policy_set": result.policy_set}
    row |= {"num_rollouts": result.num_rollouts, "num_tokens": result.num_tokens}
    for field in ("step_s", "tokens_per_s", *SHARES):
        row[field] = _short(getattr(result, field))
    row["largest_idle_share"] = _short(max(result.idle_shares))
    row |= {"num_migrated": result.num_migrated, "num_preempted": result.num_preempted}
    if result.step in outcome.measured_s:
        row["measured_s"] = _short(outcome.measured_s[result.step])
    return row


def _short(value: float) -> float:
    """Six digits: what is the same on every machine."""
    return float(f"{value:.6g}")


def _flat(policy_set: str) -> str:
    return re.sub(r"\W+", "_", policy_set)
