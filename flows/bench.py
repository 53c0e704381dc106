"""Benchmarks by name: run one, show it, write it down."""

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

from engines.paths import check_regular, explain
from engines.reports.tables import plain_table
from flows.environment import quieten
from flows.output_file import JSON, check_output, write_output
from schemas.bench import BenchReport


@dataclass(frozen=True, slots=True)
class Bench:
    measures: str
    takes: str
    """Duration on 2 cores, in words."""


BENCHES = {
    "chaos": Bench(
        "faults drawn at random on real runs: is anything lost, doubled, hung or left behind?",
        "2 to 5 minutes a fault",
    ),
    "dealing": Bench(
        "prompts dealt over engines by tokens and by passes, on a recorded run: who waits for whom",
        "half a minute for the demo",
    ),
    "deciding": Bench(
        "a decision on all moves with many engines in the middle of a step: what it takes",
        "20 seconds",
    ),
    "decoupled": Bench(
        "draft models ahead of verification: acceptance, waste, and that no token changes",
        "6 minutes for the demo",
    ),
    "demo": Bench(
        "the demo over several seeds: does reward rise, on held-out prompts too?",
        "6 minutes a seed",
    ),
    "drafting": Bench(
        "drafters and draft windows on a recorded run: acceptance and rollout time",
        "a minute for the demo",
    ),
    "driver": Bench(
        "the driver with long responses: is its event loop held up, does it hold their tokens?",
        "2 minutes",
    ),
    "entropy": Bench(
        "the same drafters on a synthetic policy of known entropy, at temperature 1",
        "a minute",
    ),
    "growth": Bench(
        "a long run: does a late step cost what an early one did?",
        "10 minutes",
    ),
    "index": Bench(
        "the history index: how fast it is built and drafts, and its size",
        "10 seconds",
    ),
    "learning": Bench(
        "every algorithm over seeds, pipelined against sync: does held-out reward rise alike?",
        "an hour: 28 runs of 2 minutes",
    ),
    "memory": Bench(
        "a trainer rank's GPU memory at its peak, without a GPU: tracked, and as it is planned",
        "2 minutes",
    ),
    "overhead": Bench(
        "orchestration: what a step takes beyond generating, scoring and training",
        "3 minutes",
    ),
    "pipeline": Bench(
        "training end to end, synchronous, pipelined and with HistoPipe: speed and idle engines",
        "1 to 2 hours for the demo",
    ),
    "race": Bench(
        "responses that another engine races: what it takes until they go on there, and all tokens",
        "5 minutes",
    ),
    "real": Bench(
        "your model and prompts, drafting off and on, by temperature: what drafts bring",
        "half an hour for a model of 135M parameters",
    ),
    "real_learning": Bench(
        "a real model learns: held-out reward, and drafts by how far the policy moves",
        "half an hour an algorithm",
    ),
    "rollout": Bench(
        "rollouts on real engines: stock vLLM against drafting off and on, by epoch",
        "10 minutes for the demo",
    ),
    "rollout_ablation": Bench(
        "rollouts with history, and without each of its parts: seconds, and that no token changes",
        "10 minutes for the demo",
    ),
    "rounds": Bench(
        "a round of a draft model: does it cost the same after a long text as after a short one?",
        "2 minutes",
    ),
    "sampling": Bench(
        "exact sampling beside vLLM's: bytes and launches of a step, and its time",
        "2 minutes",
    ),
    "sql": Bench(
        "questions to a live run's store: how soon they are answered, what they cost the run",
        "4 minutes",
    ),
    "start": Bench(
        "the start: from the command to the first rollout; another checkout beside it",
        "a minute a round",
    ),
    "switch": Bench(
        "responses that go over to a higher TP degree: what it takes, and that no token changes",
        "5 minutes",
    ),
    "sync": Bench(
        "new weights from the trainer to two engines: bytes copied, time beside plain copies",
        "2 minutes",
    ),
    "training": Bench(
        "training of a recorded step: what its seconds are spent on",
        "a minute for the demo",
    ),
}
"""Modules of `benchmarks` by name, each with `add_arguments`, `measure` and `show`."""


MAX_NUMBER = 10**9
"""Largest number that a bench takes."""


class _Parser(ArgumentParser):
    """Bad arguments are a ValueError, as all bad input is: numbers have bounds, and paths lead to
    files and directories alone."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.register("type", int, _whole_number)
        self.register("type", Path, _usable_path)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` tells what it takes")


def _whole_number(text: str) -> int:
    """Raises ArgumentTypeError as argparse wants it."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= MAX_NUMBER):
        raise ArgumentTypeError(f"{text[:40]!r} is no whole number from 0 to {MAX_NUMBER:,}")
    return int(text)


def _usable_path(text: str) -> Path:
    """Raises ArgumentTypeError for what can be neither a file nor a directory."""
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
    """Measure, show and write. Raises ValueError for bad input, before anything is measured."""
    if name not in BENCHES:
        problem = f"there is no bench {name!r}" if name else "give the NAME of a bench"
        raise ValueError(f"{problem}; known: {', '.join(BENCHES)}; --list tells what they measure")
    quieten()  # Before Ray is imported: its token mode is read then.
    module = importlib.import_module(f"benchmarks.{name}")
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
    # With the JSON on standard output, everything for people goes elsewhere.
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
    """A row on a line."""
    values = report.model_dump()
    rows = ",\n".join(f"  {json.dumps(row)}" for row in values.pop("rows"))
    text = json.dumps({"name": values.pop("name"), "figures": values.pop("figures")}, indent=1)
    rest = json.dumps(values, indent=1)
    return f'{text[:-2]},\n "rows": [\n{rows}\n ],\n{rest[2:]}\n'


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those that are installed; `vllm` is either build."""
    from engines.inference.profiling.engine import vllm_version

    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = vllm_version() if package == "vllm" else version(package)
    return versions


def _without_json(arguments: Sequence[str]) -> list[str]:
    """The arguments, but for where results go."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json")
    return parser.parse_known_args(arguments)[1]
