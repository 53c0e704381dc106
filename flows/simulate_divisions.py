"""`refrain simulate --divide N`: how to divide N GPUs between engines and trainer."""

from dataclasses import replace

from rich.console import Console
from rich.progress import Progress

from refrain.engines.latency.hardware import HARDWARE
from refrain.engines.latency.model_shape import SHAPES
from refrain.engines.reports.divisions import divided_json, print_divided
from refrain.engines.simulate.cluster import PolicySet
from refrain.engines.simulate.placements import DividedScene, divisions, simulate_division
from refrain.engines.simulate.trace import trained_token_s
from refrain.flows.output_file import JSON, check_output, write_output
from refrain.flows.simulate_input import (
    Arguments,
    find_trace,
    known_name,
    option,
    read_policies,
    trace_case,
)
from refrain.schemas.simulate import DividedRun
from refrain.tasks.run.run_dir import read_config

NEEDS_FORMULA = (
    "--divide needs --hardware and --shape, for memory and hand-over times. Add --profile to use "
    "measured times of the engines"
)


def launch_divided(args: Arguments) -> None:
    """Validate, simulate, print and write. Raise ValueError for bad input."""
    check_output(args.json, JSON, "--json")
    policy_sets = read_policies(args.policies)
    scene, says = read_scene(args, policy_sets)
    console = Console(stderr=args.json == "-", highlight=False, markup=False)
    console.print(f"SIMULATION of {scene.trace.source}: {says}", soft_wrap=True)
    runs: list[DividedRun] = []
    ways = divisions(scene.num_gpus, scene.layout.tp_degree)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        work = [(policy_set, way) for policy_set in policy_sets for way in ways]
        for policy_set, way in progress.track(work, description="division"):
            runs.append(simulate_division(scene, policy_set, way))
    for policy_set in policy_sets:
        own = [run for run in runs if run.policy_set == policy_set.name]
        print_divided(own, scene.layout.tp_degree, console)
    if args.json:
        text = divided_json(args.name, runs, scene.layout.tp_degree, args.command)
        write_output(args.json, text)


def read_scene(args: Arguments, policy_sets: tuple[PolicySet, ...]) -> tuple[DividedScene, str]:
    """Return the scene, and a description of its latency models. Raise ValueError for missing or
    contradictory options."""
    if args.trace is None or args.paper:
        raise ValueError("--divide needs a TRACE: give one, and leave out --paper")
    if excess := [name for name in ("engines", "num_gpus", "out") if name in args.given()]:
        raise ValueError(f"{option(excess[0])} does not work with --divide: leave it out")
    if pipelined := [policy_set.name for policy_set in policy_sets if policy_set.histopipe]:
        raise ValueError(
            f"--policies {pipelined[0]}: --divide tries its own pipelined modes. Give even or "
            "ranked"
        )
    if args.hardware is None or args.shape is None:
        raise ValueError(NEEDS_FORMULA)
    assert args.divide is not None
    formula = {"hardware": None, "shape": None} if args.profile else {}
    case = trace_case(replace(args, engines=1, **formula), policy_sets)
    divisions(args.divide, case.layout.tp_degree)
    token_s, measured = (None, "formula")
    if args.profile and (found := _measured_token_s(args.trace)):
        token_s, measured = found, "measured in the run"
    scene = DividedScene(
        trace=case.trace,
        steps=case.steps,
        num_gpus=args.divide,
        layout=case.layout,
        latency=case.latency,
        hardware=HARDWARE[known_name(HARDWARE, args.hardware, "--hardware")],
        shape=SHAPES[known_name(SHAPES, args.shape, "--shape")],
        gpu_s_per_token=token_s,
        acceptance=args.acceptance,
    )
    says = (
        f"{args.divide} {scene.hardware.name}, engines of TP {case.layout.tp_degree}; rollouts: "
        f"{case.latency_name}; training: {measured}; hand-over: formula"
    )
    return scene, says


def _measured_token_s(trace: str) -> float | None:
    """Return the seconds that one trainer process takes per token, measured in the trace's run.
    None for a trace file, and for a run that has not trained yet."""
    path = find_trace(trace)
    if path.suffix != ".duckdb" or not (token_s := trained_token_s(path)):
        return None
    return token_s * read_config(path.parent).trainer.num_processes
