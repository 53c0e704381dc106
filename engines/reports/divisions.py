"""Report simulated divisions of a run's GPUs: a table, a recommendation with reasons, and JSON."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from refrain.engines.reports.simulation import Cell, flat, report_json, short
from refrain.engines.reports.tables import plain_table
from refrain.engines.simulate.placements import fastest
from refrain.schemas.simulate import DividedRun, Division

SYNC = "sync"


def print_divided(runs: Sequence[DividedRun], tp_degree: int, console: Console) -> None:
    """Print the runs of one policy set, and the recommendation."""
    columns = ("GPUs", "step s", "rollout", "training", "between", "idle", "")
    table = plain_table("mode, placement", *columns, text=("mode, placement",), min_width=16)
    best = fastest(runs)
    for run in runs:
        division = run.division
        between = f"{run.between_s:,.2f}" if division.mode == SYNC else "beside"
        table.add_row(
            f"{division.mode} {division.placement}",
            gpus(division),
            f"{run.step_s:,.2f}",
            f"{run.rollout_s:,.2f}",
            f"{run.train_s:,.2f}",
            between,
            f"{run.idle_share:.0%}",
            "no room" if run.lacks else ("fastest" if run is best else ""),
        )
    console.print(f"SIMULATION, policy set {runs[0].policy_set}, seconds of a step")
    console.print(table)
    for lacks in dict.fromkeys(run.lacks for run in runs if run.lacks):
        console.print(f"no room: {lacks}", soft_wrap=True)
    for line in recommend(runs, tp_degree):
        console.print(line, soft_wrap=True)
    console.print()


def recommend(runs: Sequence[DividedRun], tp_degree: int) -> list[str]:
    """Return lines with the settings of the fastest division and the reasons. If the fastest
    on-policy division is another one, add its lines. `runs` must be of one policy set."""
    best, on_policy = fastest(runs), fastest(runs, SYNC)
    if best is None:
        return ["no division fits: use more GPUs, or larger ones"]
    lines = [f"recommended: {settings(best.division, tp_degree)}"]
    lines += [f"  {_why(best, runs)}"]
    if on_policy and on_policy is not best:
        ratio = on_policy.step_s / best.step_s
        lines += [
            f"strictly on-policy: {settings(on_policy.division, tp_degree)}",
            f"  takes {ratio:.2f} times as long, without tokens of earlier policy versions; "
            f"{_why(on_policy, [run for run in runs if run.division.mode == SYNC])}",
        ]
    return lines


def settings(division: Division, tp_degree: int) -> str:
    """Return the run settings for a division."""
    engines = f"rollout.num_engines={division.engine_gpus // tp_degree}"
    tp = f" rollout.tp_degree={tp_degree}" if tp_degree > 1 else ""
    return (
        f"staleness={int(division.mode != SYNC)} placement={division.placement} {engines}{tp} "
        f"trainer.num_processes={division.trainer_gpus}"
    )


def gpus(division: Division) -> str:
    if division.placement == "shared":
        return f"{division.engine_gpus} in turn"
    return f"{division.engine_gpus} + {division.trainer_gpus}"


def divided_json(name: str, runs: Sequence[DividedRun], tp_degree: int, command: str) -> str:
    """Return the JSON report with a row for each policy set and division. The same simulation gives
    the same bytes."""
    figures: dict[str, Cell] = {}
    for policy_set in dict.fromkeys(run.policy_set for run in runs):
        own = [run for run in runs if run.policy_set == policy_set]
        prefix = flat(policy_set)
        for kind, mode in (("", None), ("on_policy_", SYNC)):
            if best := fastest(own, mode):
                figures[f"{prefix}_{kind}recommended"] = settings(best.division, tp_degree)
                figures[f"{prefix}_{kind}step_s"] = short(best.step_s)
    return report_json(name, figures, [_row(run) for run in runs], command)


def _why(best: DividedRun, runs: Iterable[DividedRun]) -> str:
    """Explain a division's time, and compare it with the fastest run of each other mode and
    placement."""
    others = [run for run in runs if _kind(run) != _kind(best) and not run.lacks]
    said = f"{best.step_s:,.2f} s a step, {best.idle_share:.0%} of the GPUs' time idle"
    if best.division.mode == SYNC and best.between_s:
        said += f", {best.between_s:,.2f} s of it between rollouts and training"
    firsts = {_kind(run): run for run in sorted(others, key=lambda run: -run.step_s)}
    for run in sorted(firsts.values(), key=lambda run: run.step_s):
        said += (
            f"; {run.division.mode} {run.division.placement} ({gpus(run.division)}) takes "
            f"{run.step_s / best.step_s:.2f} times as long with {run.idle_share:.0%} idle"
        )
    return said


def _kind(run: DividedRun) -> tuple[str, str]:
    return run.division.mode, run.division.placement


def _row(run: DividedRun) -> Mapping[str, Cell]:
    numbers = ("step_s", "rollout_s", "train_s", "between_s", "samples_per_s", "idle_share")
    return {
        "policy_set": run.policy_set,
        **run.division.model_dump(),
        **{name: short(getattr(run, name)) for name in numbers},
        "lacks": run.lacks,
    }
