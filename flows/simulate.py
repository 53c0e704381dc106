"""Replay a trace on virtual engines in virtual time, once with each policy set."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from refrain.engines.paths import check_place
from refrain.engines.reports.simulation import (
    SimulationOutcome,
    draw_gantt,
    print_facts,
    print_outcome,
    to_json,
)
from refrain.engines.simulate.cluster import PolicySet, Simulation, compare_step
from refrain.engines.simulate.counted_latency import CountedLatency
from refrain.flows.output_file import JSON, PNG, check_output, making, write_output, writing
from refrain.flows.simulate_input import RUNS, Arguments, SimulationCase, read_cases, read_policies
from refrain.schemas.simulate import SimulatedStep


def launch_simulate(args: Arguments) -> None:
    """Validate, simulate, print, draw and write. Raise ValueError for bad input."""
    _check_targets(args)
    policy_sets = read_policies(args.policies)
    cases = read_cases(args, policy_sets)
    # When the JSON goes to standard output, print the tables to standard error.
    console = Console(stderr=args.json == "-", highlight=False, markup=False)
    out = args.out or RUNS / "simulations" / args.name
    outcomes = []
    for case in cases:
        console.print(f"SIMULATION of {case.trace.source}: {_describe(case)}", soft_wrap=True)
        results, longest = _simulate(case, policy_sets, args.acceptance, console)
        outcomes.append(SimulationOutcome(case.name, results, case.measured_s, case.facts))
        print_outcome(outcomes[-1], console)
        if isinstance(case.latency, CountedLatency) and case.latency.complaint:
            console.print(f"warning: {case.latency.complaint}", style="yellow", soft_wrap=True)
        prefix = f"{case.name}-" if len(cases) > 1 else ""
        _draw(case.name, longest, out, prefix)
    print_facts(outcomes, console)
    studies = chain.from_iterable(zip(*(case.studies for case in cases), strict=True))
    ablations = [found for study in studies for found in study(args.seed or 0, console)]
    console.print(f"pictures: {out}", soft_wrap=True)
    if args.json:
        text = to_json(args.name, outcomes, args.command, ablations)
        write_output(args.json, text)


def _check_targets(args: Arguments) -> None:
    check_output(args.json, JSON, "--json")
    if args.out:
        check_place(args.out, f"--out {args.out}")


def _describe(case: SimulationCase) -> str:
    layout = case.layout
    capacity = layout.max_context_tokens
    return (
        f"{layout.num_engines} engines of TP {layout.tp_degree}, at most {layout.max_num_seqs} "
        f"requests and {f'{capacity:,}' if capacity else 'any number of'} tokens each; "
        f"latency: {case.latency_name}"
    )


def _simulate(
    case: SimulationCase,
    policy_sets: Sequence[PolicySet],
    acceptance: float | None,
    console: Console,
) -> tuple[list[SimulatedStep], list[Simulation]]:
    """Simulate all steps with each policy set. Return the results, and the simulations of the step
    that is longest with the first policy set."""
    results: list[SimulatedStep] = []
    longest: list[Simulation] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for step in progress.track(case.steps, description=f"{case.name}: step"):
            simulations = compare_step(
                case.trace, step, case.layout, case.latency, policy_sets, acceptance
            )
            results += [simulation.step for simulation in simulations]
            if not longest or simulations[0].step.step_s > longest[0].step.step_s:
                longest = simulations
    return results, longest


def _draw(name: str, simulations: Sequence[Simulation], out: Path, prefix: str) -> None:
    """Draw one step with each policy set, one picture each, on the same time axis."""
    axis_s = max(simulation.step.step_s for simulation in simulations)
    with making(out):
        for simulation in simulations:
            step = simulation.step
            title = f"SIMULATION {name}, step {step.step}, {step.policy_set}: {step.step_s:,.2f} s"
            file = out / f"{prefix}{step.policy_set.replace(':', '_')}.png"
            check_output(file, PNG)
            with writing(file) as picture:
                draw_gantt(simulation.timelines, axis_s, picture, title)
