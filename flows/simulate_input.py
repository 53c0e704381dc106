"""Turn the options of `refrain simulate` into objects, and refuse what is wrong."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from refrain.engines.histospec.window import DEFAULT
from refrain.engines.latency.analytic import LOOKUP_S, AnalyticLatency
from refrain.engines.latency.hardware import HARDWARE
from refrain.engines.latency.interface import Latency
from refrain.engines.latency.model_shape import SHAPES, ModelShape
from refrain.engines.latency.profile_file import find_profile, read_profile, require_points
from refrain.engines.reports.simulation import Ablation, Fact
from refrain.engines.simulate.cluster import PLACEMENTS, PolicySet, check_latency, even
from refrain.engines.simulate.counted_latency import CountedLatency
from refrain.engines.simulate.history import DRAFTINGS, check_token_ids
from refrain.engines.simulate.trace import Trace, from_store, measured_s, read_trace
from refrain.schemas.drafting import HISTORY, TEXT_DRAFTERS
from refrain.schemas.latency import PointKind
from refrain.schemas.rollout import DraftSetting
from refrain.schemas.scheduling import HistoPipeConfig
from refrain.schemas.simulate import ClusterLayout
from refrain.tasks.run.find import find_run
from refrain.tasks.run.run_dir import STORE_FILE

RUNS = Path("runs")
HISTOPIPE = "histopipe"
"""Policy set with the placement and the moves of a pipelined run."""
REPORT_S = 1.0
"""Seconds between two decisions of its policies while no rollout finishes."""
MAX_DIGITS = 10
"""Limit on the digits of a step or of a draft window."""
PAPERS = "refrain.benchmarks.papers"
"""Package that `--paper` loads. Nothing else here needs the benchmarks."""
Study = Callable[[int, Console], Iterator[Ablation]]
"""Function that studies a paper and yields its findings. Takes a seed and a console."""
LAYOUT_FIELDS = {
    "engines": "num_engines",
    "tp": "tp_degree",
    "gpus_per_node": "gpus_per_node",
    "num_gpus": "num_gpus",
    "max_num_seqs": "max_num_seqs",
    "kv_tokens": "max_context_tokens",
}
"""Options, and the fields of `ClusterLayout` that they set."""
OF_TRACES = (*LAYOUT_FIELDS, "profile", "hardware", "shape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Options of the command. None: not given."""

    trace: str | None
    paper: str | None
    profile: str | None
    hardware: str | None
    shape: str | None
    engines: int | None
    divide: int | None
    tp: int | None
    gpus_per_node: int | None
    num_gpus: int | None
    max_num_seqs: int | None
    kv_tokens: int | None
    policies: str
    acceptance: float | None
    steps: str | None
    seed: int | None
    out: Path | None
    json: str | None

    @property
    def name(self) -> str:
        if self.paper:
            return self.paper.lower()
        path = Path(str(self.trace)).absolute()
        if path.name == STORE_FILE:
            return path.parent.name
        return path.stem if path.is_file() else path.name

    @property
    def command(self) -> str:
        """The command line without --out and --json."""
        words = ["refrain", "simulate", *([self.trace] if self.trace else [])]
        for name, value in self.given().items():
            if name not in ("trace", "out", "json"):
                words += [option(name), str(value)]
        return shlex.join(words)

    def given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SimulationCase:
    """A trace on a cluster. A paper may have several cases."""

    name: str
    trace: Trace
    steps: Sequence[int]
    layout: ClusterLayout
    latency: Latency
    latency_name: str
    measured_s: Mapping[int, float]
    """Seconds per step that the trace's run took."""
    facts: Sequence[Fact] = ()
    studies: Sequence[Study] = ()
    """Studies of the paper beyond its baseline."""


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_policies(text: str) -> tuple[PolicySet, ...]:
    """Parse --policies, for example `even,ranked+ngram:4,ranked+histospec`."""
    sets = tuple(_policy_set(word.strip()) for word in text.split(","))
    names = [policy_set.name for policy_set in sets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--policies names {twice[0]} twice: name each policy set once")
    return sets


def read_cases(args: Arguments, policy_sets: Sequence[PolicySet]) -> list[SimulationCase]:
    """Return the cases to simulate. Raise ValueError for missing, contradictory, unknown or
    impossible options."""
    if (args.trace is None) == (args.paper is None):
        raise ValueError("give either a TRACE or --paper NAME, and not both")
    _check_acceptance(args, policy_sets)
    return _paper_cases(args, policy_sets) if args.paper else [trace_case(args, policy_sets)]


def _paper_cases(args: Arguments, policy_sets: Sequence[PolicySet]) -> list[SimulationCase]:
    known_papers = import_module(f"{PAPERS}.settings").SETTINGS
    study = import_module(f"{PAPERS}.study").study
    settings = known_papers[known_name(known_papers, args.name, "--paper")]
    if excess := [name for name in OF_TRACES if name in args.given()]:
        raise ValueError(f"{option(excess[0])} is set by --paper: leave it out, or give a TRACE")
    if policy_sets[0].name != "even":
        raise ValueError("a paper's baseline is even: begin --policies with even")
    cases = []
    for setting in settings:
        known = range(1, setting.spec.num_steps + 1)
        steps = chosen_steps(args.steps, known, setting.name) if args.steps else setting.steps
        _check_latency(setting.latency, setting.layout.tp_degree, policy_sets)
        cases.append(
            SimulationCase(
                name=setting.name,
                trace=setting.trace(args.seed or 0, steps),
                steps=steps,
                layout=setting.layout,
                latency=setting.latency,
                latency_name="straight lines through the paper's printed values",
                measured_s={},
                facts=setting.facts,
                # Studies simulate other steps too, so leave them out when --steps is given.
                studies=() if args.steps else (partial(study, setting),),
            )
        )
    return cases


def trace_case(args: Arguments, policy_sets: Sequence[PolicySet]) -> SimulationCase:
    if args.engines is None:
        raise ValueError("give the number of engines by --engines")
    if args.seed is not None:
        raise ValueError("--seed is for the traces of --paper: leave it out with a TRACE")
    layout = _layout(args)
    latency, latency_name, capacity = _latency(args, layout.tp_degree, policy_sets)
    if layout.max_context_tokens is None:
        layout = layout.model_copy(update={"max_context_tokens": capacity})
    from_history = any(policy_set.histospec for policy_set in policy_sets)
    trace, measured = _read_trace(str(args.trace), from_history)
    steps = trace.steps
    if args.steps:
        steps = chosen_steps(args.steps, steps, trace.source)
    if from_history:
        check_token_ids(trace)
    drafts = any(policy_set.drafting for policy_set in policy_sets)
    _check_rows(trace, steps, layout, not drafts or args.acceptance is not None)
    return SimulationCase(args.name, trace, steps, layout, latency, latency_name, measured)


def known_name(names: Mapping[str, Any], name: str, what: str) -> str:
    """Return the known name that equals `name` in any case. `what` names the option in errors."""
    for known in names:
        if known.lower() == name.lower():
            return known
    raise ValueError(f"{what} {name!r} is unknown; known: {', '.join(names)}")


def _policy_set(text: str) -> PolicySet:
    placement, plus, draft = text.partition("+")
    if placement != HISTOPIPE and placement not in PLACEMENTS:
        known = ", ".join((*PLACEMENTS, HISTOPIPE))
        raise ValueError(f"--policies: {text!r} has no known placement; known: {known}")
    placed = PolicySet(text, PLACEMENTS.get(placement, even))
    if placement == HISTOPIPE:
        placed = replace(placed, histopipe=HistoPipeConfig(), report_s=REPORT_S)
    if not plus:
        return placed
    drafter, colon, window = draft.partition(":")
    if drafter.lower() == HISTORY:
        name = window if colon else DEFAULT
        config = DRAFTINGS[known_name(DRAFTINGS, name, "--policies: window policy")]
        return replace(placed, histospec=config)
    if not drafter or not _is_number(window) or int(window) < 1:
        raise ValueError(
            f"--policies: {text!r} does not say how to draft: write {placement}+DRAFTER:WINDOW, "
            f"the window at least 1, for example {placement}+ngram:4"
        )
    setting = DraftSetting(drafter, int(window), coupled=drafter in TEXT_DRAFTERS)
    return replace(placed, drafting=setting)


def chosen_steps(text: str, known: Sequence[int], source: str) -> tuple[int, ...]:
    """Parse --steps, for example `1-10,20`. Return the steps of each range that the source has."""
    steps: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not _is_number(first) or (dash and not _is_number(last)):
            raise ValueError(f"--steps {text!r}: {part!r} is no step: write for example 1-10,20")
        wanted = range(int(first), int(last or first) + 1)
        found = {step for step in known if step in wanted}
        if not found:
            raise ValueError(
                f"--steps {text!r}: {source} has no step {part.strip()}; "
                f"its steps are {known[0]} to {known[-1]}"
            )
        steps |= found
    return tuple(sorted(steps))


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) < MAX_DIGITS


def _layout(args: Arguments) -> ClusterLayout:
    given = args.given()
    values = {field: given[name] for name, field in LAYOUT_FIELDS.items() if name in given}
    try:
        return ClusterLayout(**values)
    except ValidationError as error:
        raise ValueError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    """Return the first problem, with the name of the option that it is about."""
    problem = error.errors()[0]
    options = {field: option(name) for name, field in LAYOUT_FIELDS.items()}
    where = ".".join(options.get(str(part), str(part)) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _latency(
    args: Arguments, tp_degree: int, policy_sets: Sequence[PolicySet]
) -> tuple[Latency, str, int]:
    """Return the latency model, its description, and the capacity of an engine's KV cache in
    tokens."""
    formula = (args.hardware, args.shape)
    if None in formula if args.profile is None else formula != (None, None):
        raise ValueError("give either --profile, or both --hardware and --shape, for the latency")
    if args.profile:
        path = find_profile(args.profile, RUNS)
        profile = read_profile(path)
        kinds = (PointKind.DECODE, PointKind.PREFILL)
        require_points(profile, path, (tp_degree,), kinds, "give another --tp or profile this one")
        what = f"profile of {profile.model_name} on {profile.hardware}"
        latency, capacity = CountedLatency(profile), profile.kv_capacity_tokens(tp_degree)
    else:
        latency = _analytic(str(args.hardware), str(args.shape), policy_sets)
        what = f"formula for {latency.model_shape.name} on {latency.hardware.name}"
        capacity = latency.kv_capacity_tokens(tp_degree)
        if not capacity:
            raise ValueError(f"{what}: the weights do not fit at TP {tp_degree}: raise --tp")
    _check_latency(latency, tp_degree, policy_sets)
    return latency, what, capacity


def _analytic(hardware: str, shape: str, policy_sets: Sequence[PolicySet]) -> AnalyticLatency:
    drafters: dict[str, ModelShape | float] = {}
    for policy_set in policy_sets:
        if policy_set.setting:
            name = policy_set.setting.drafter
            choices = {"ngram": LOOKUP_S, HISTORY: LOOKUP_S} | SHAPES
            drafters[name] = choices[known_name(choices, name, "--policies: drafter")]
    return AnalyticLatency(
        SHAPES[known_name(SHAPES, shape, "--shape")],
        HARDWARE[known_name(HARDWARE, hardware, "--hardware")],
        drafters,
    )


def _read_trace(name: str, token_ids: bool) -> tuple[Trace, Mapping[int, float]]:
    """Return the trace, and the measured seconds of its steps when it is a run's store.

    `token_ids`: read the token ids from a run's store too. A trace file may have them or not.
    """
    path = find_trace(name)
    if path.suffix != ".duckdb":
        return read_trace(path), {}
    return from_store(path, token_ids=token_ids), measured_s(path)


def find_trace(name: str) -> Path:
    """Return the path of a trace or a run's store, which is given by path, directory or name."""
    if Path(name).is_file():
        return Path(name)
    if not Path(name).exists() and not (RUNS / name).exists():
        raise ValueError(
            f"{name} does not exist: give a Parquet trace, a run's {STORE_FILE}, its directory, "
            f"or its name under {RUNS}"
        )
    return find_run(name, RUNS, STORE_FILE) / STORE_FILE


def _check_acceptance(args: Arguments, policy_sets: Sequence[PolicySet]) -> None:
    if args.acceptance is None:
        return
    if not any(policy_set.drafting for policy_set in policy_sets):
        raise ValueError(
            "--acceptance: no policy set drafts by it; add one, as in --policies even+ngram:4"
        )


def _check_latency(latency: Latency, tp_degree: int, policy_sets: Sequence[PolicySet]) -> None:
    for policy_set in policy_sets:
        check_latency(latency, tp_degree, policy_set.setting)


def _check_rows(
    trace: Trace, steps: Sequence[int], layout: ClusterLayout, knows_acceptance: bool
) -> None:
    """Check all rows before the simulation starts. It would find problems only at their step."""
    capacity = layout.max_context_tokens
    for step in steps:
        rows = trace.step(step)
        if not knows_acceptance and rows.table["acceptance"].null_count == len(rows):
            raise ValueError(
                f"{trace.source}, step {step}, has no acceptance, so drafting cannot be "
                "simulated: give --acceptance, for example --acceptance 0.6"
            )
        longest = int((rows.column("prompt_tokens") + rows.column("response_tokens")).max())
        if capacity is not None and longest > capacity:
            raise ValueError(
                f"{trace.source}, step {step}, has a rollout of {longest:,} tokens, and the KV "
                f"cache of an engine holds {capacity:,}: raise --kv-tokens or --tp"
            )
