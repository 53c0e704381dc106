"""Run a benchmark by its name, print its table and write its results."""

import importlib
import json
import shlex
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from refrain.engines.paths import check_regular, explain
from refrain.engines.reports.tables import plain_table
from refrain.flows.environment import quieten
from refrain.flows.output_file import JSON, check_output, write_output
from refrain.schemas.bench import BenchReport


@dataclass(frozen=True, slots=True)
class Bench:
    measures: str
    takes: str
    """Duration on 2 cores, in words."""


BENCHES = {
    "chaos": Bench(
        "real runs with random faults: does a run lose, repeat, hang or leave anything behind?",
        "2 to 5 minutes a fault",
    ),
    "deciding": Bench(
        "the time of one decision on all moves, in the middle of a step with many engines",
        "20 seconds",
    ),
    "decoupled": Bench(
        "draft models that run ahead of verification: acceptance, waste, unchanged tokens",
        "6 minutes for the demo",
    ),
    "demo": Bench(
        "the demo over several seeds: does reward rise, also on held-out prompts?",
        "6 minutes a seed",
    ),
    "distillation": Bench(
        "a weak student taught by a teacher, and by rewards: samples until it is as good",
        "half an hour",
    ),
    "drafting": Bench(
        "drafters and draft windows on a recorded run: acceptance and rollout time",
        "a minute for the demo",
    ),
    "driver": Bench(
        "the driver with long responses and with 256 engines: does its event loop block?",
        "2 minutes",
    ),
    "entropy": Bench(
        "the same drafters on a synthetic policy of known entropy, at temperature 1",
        "a minute",
    ),
    "growth": Bench(
        "a long run: do late steps cost as much as early ones?",
        "10 minutes",
    ),
    "host": Bench(
        "the scheduler's time in a decoding step: vLLM's beside refrain's, unchanged tokens",
        "a minute",
    ),
    "house": Bench(
        "the size of the source, its imports and prose, and the calls from a stage to vLLM",
        "a minute",
    ),
    "index": Bench(
        "the history index: its size, and how fast it builds and drafts",
        "10 seconds",
    ),
    "learning": Bench(
        "every algorithm over seeds, pipelined against sync: does held-out reward rise as much?",
        "an hour: 28 runs of 2 minutes",
    ),
    "memory": Bench(
        "a trainer rank's peak GPU memory, tracked without a GPU, against the planned memory",
        "2 minutes",
    ),
    "overhead": Bench(
        "orchestration: the seconds of a step that are not rollout, reward or training",
        "3 minutes",
    ),
    "pipeline": Bench(
        "training end to end, sync, pipelined and with HistoPipe: speed and idle engines",
        "1 to 2 hours for the demo",
    ),
    "race": Bench(
        "responses raced on a second engine: time until they continue there, unchanged tokens",
        "5 minutes",
    ),
    "real": Bench(
        "your model and prompts, drafting off and on, by temperature: the speedup of drafts",
        "half an hour for a model of 135M parameters",
    ),
    "real_learning": Bench(
        "a real model in training: held-out reward, and drafts as the policy changes",
        "half an hour an algorithm",
    ),
    "rollout": Bench(
        "rollouts on real engines: stock vLLM against drafting off and on, by epoch",
        "10 minutes for the demo",
    ),
    "sampling": Bench(
        "exact sampling and vLLM's sampling: bytes, kernel launches and time of a step",
        "2 minutes",
    ),
    "samples": Bench(
        "looking at the samples of a large run: seconds of a page, in each order",
        "a minute",
    ),
    "sql": Bench(
        "SQL queries on a live run's store: their latency, and what they cost the run",
        "4 minutes",
    ),
    "start": Bench(
        "the start: seconds from the command to the first rollout",
        "a minute a round",
    ),
    "switch": Bench(
        "responses that move to a higher TP degree: the time it takes, unchanged tokens",
        "5 minutes",
    ),
    "sync": Bench(
        "weight sync from the trainer to two engines: bytes copied, time against plain copies",
        "2 minutes",
    ),
    "tools": Bench(
        "conversations with tools: an engine's slots in use, its prefix cache, instant answers",
        "5 minutes",
    ),
    "update": Bench(
        "an update of the trainer, eager and compiled: launches, bytes and FLOPs, without a GPU",
        "2 minutes",
    ),
}
"""Modules of `benchmarks` by name, each with `add_arguments`, `measure` and `show`."""


MAX_NUMBER = 10**9
"""Largest number that a bench takes."""


class _Parser(ArgumentParser):
    """A parser that raises ValueError for bad arguments, as all commands do. It bounds numbers, and
    takes only paths of files and directories."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.register("type", int, _whole_number)
        self.register("type", Path, _usable_path)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` lists the arguments")


def _whole_number(text: str) -> int:
    """Parse a number from 0 to MAX_NUMBER. Raise ArgumentTypeError, which argparse handles."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= MAX_NUMBER):
        raise ArgumentTypeError(f"{text[:40]!r} is no whole number from 0 to {MAX_NUMBER:,}")
    return int(text)


def _usable_path(text: str) -> Path:
    """Return the path. Raise ArgumentTypeError when it can be neither a file nor a directory."""
    path = Path(text)
    try:
        path.lstat()
        if not path.is_dir():
            check_regular(path)
    except FileNotFoundError:
        return path
    except (OSError, ValueError) as error:
        said = explain(error, text) if isinstance(error, OSError) else str(error)
        raise ArgumentTypeError(said) from error
    return path


def list_benches() -> None:
    columns = ("bench", "measures", "takes about")
    table = plain_table(*columns, text=columns)
    for name, bench in BENCHES.items():
        table.add_row(name, bench.measures, bench.takes)
    Console(highlight=False).print(table)


def launch_bench(name: str | None, arguments: Sequence[str]) -> None:
    """Measure, print and write. Raise ValueError for bad input before the measurement."""
    if name not in BENCHES:
        problem = f"there is no bench {name!r}" if name else "give the NAME of a bench"
        raise ValueError(f"{problem}; known: {', '.join(BENCHES)}; --list describes them")
    quieten()  # Before the import of Ray, which reads its token mode then.
    module = importlib.import_module(f"refrain.benchmarks.{name}")
    parser = _Parser(
        prog=f"refrain bench {name}",
        description=module.__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write figures and rows here; - for standard output"
    )
    args = parser.parse_args(arguments)
    check_output(args.json, JSON, "--json")
    # When the JSON goes to standard output, print the tables to standard error.
    console = Console(stderr=args.json == "-", highlight=False, markup=False)
    figures, rows = module.measure(args, console)
    report = BenchReport(
        name=name,
        figures=figures,
        rows=tuple(rows),
        command=shlex.join(["refrain", "bench", name, *_without_json(arguments)]),
        versions=_versions(module.PACKAGES),
    )
    module.show(report, console)
    if args.json:
        text = to_json(report)
        write_output(args.json, text)


def to_json(report: BenchReport) -> str:
    """Return the report as JSON with each row on one line."""
    values = report.model_dump()
    rows = ",\n".join(f"  {json.dumps(row)}" for row in values.pop("rows"))
    text = json.dumps({"name": values.pop("name"), "figures": values.pop("figures")}, indent=1)
    rest = json.dumps(values, indent=1)
    return f'{text[:-2]},\n "rows": [\n{rows}\n ],\n{rest[2:]}\n'


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed packages. `vllm` stands for its GPU and CPU builds."""
    from refrain.engines.inference.profiling.engine import vllm_version

    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = vllm_version() if package == "vllm" else version(package)
    return versions


def _without_json(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without --json."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json")
    return parser.parse_known_args(arguments)[1]
