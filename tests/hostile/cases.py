"""Generate hostile values for every argument and option of every command, from click's lists."""

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import click

from refrain.flows.cli import main
from tests.hostile.place import MAKERS, NAMES, HostilePlace


class Kind(StrEnum):
    """Kinds of values. Each kind has its own hostile values."""

    FILE = "a file that is read"
    DIRECTORY = "a directory that is read"
    RUN = "a run, by its name or directory"
    OUTPUT = "a file that is written"
    MADE = "a directory that is made when it is missing"
    NUMBER = "a number"
    WORD = "a word"


DEVICES = tuple(kind for kind in MAKERS if kind.endswith("device"))
COMMON = ("link loop", "FIFO", "socket", *DEVICES, *NAMES)
PATHS = {
    Kind.FILE: (
        *("missing", "empty", "directory", "dangling link", "garbage", "a word", "depth", "huge"),
        *("no permission", *COMMON),
    ),
    Kind.DIRECTORY: ("missing", "empty", "dangling link", "garbage", *COMMON),
    Kind.OUTPUT: ("directory", *COMMON),
    Kind.MADE: ("empty", "dangling link", *COMMON),
}
PATHS[Kind.RUN] = PATHS[Kind.DIRECTORY] + ("directory",)
NUMBERS = (
    *("nan", "inf", "-inf", "-1", "0", "1e308", "1" + "0" * 30, "9" * 5000, "-" + "9" * 30),
    *("", "many", "0x10", "1.5", "٣", "1e-320", "\udcff"),
)
WORDS = ("", " ", "x" * 300, "x" * 100_000, "a\nb", "\udcff", "../../..", "-", "[" * 5000)
WORDS += ("nan", "\x1b[31m", "..", "/", "=", "%s{0}")
FAULTS = {
    Kind.FILE: (("o", errno.EACCES), ("o", errno.EIO), ("r", errno.EIO)),
    Kind.DIRECTORY: (("o", errno.EACCES), ("o", errno.EIO), ("r", errno.EIO)),
    Kind.OUTPUT: (
        *(("c", errno.EROFS), ("c", errno.EACCES), ("c", errno.EDQUOT)),
        *(("w", errno.ENOSPC), ("w", errno.EIO)),
    ),
}
READ = (Kind.FILE, Kind.DIRECTORY, Kind.RUN)
FAULTS[Kind.RUN] = FAULTS[Kind.DIRECTORY]
FAULTS[Kind.MADE] = FAULTS[Kind.OUTPUT]

DECLARED: dict[tuple[str, str], tuple[Kind, str]] = {
    ("train", "config_file"): (Kind.FILE, "train.yaml"),
    ("train", "resume"): (Kind.RUN, "runs/demo"),
    ("train", "overrides"): (Kind.WORD, ""),
    ("train", "gpus"): (Kind.WORD, ""),
    ("demo", "overrides"): (Kind.WORD, ""),
    ("show", "run"): (Kind.RUN, "runs/demo"),
    ("samples", "run"): (Kind.RUN, "runs/demo"),
    ("samples", "prompt"): (Kind.WORD, ""),
    ("samples", "grep"): (Kind.WORD, ""),
    ("sql", "run"): (Kind.RUN, "runs/demo"),
    ("sql", "query"): (Kind.WORD, ""),
    ("sql", "csv_file"): (Kind.OUTPUT, "out.csv"),
    ("report", "run"): (Kind.RUN, "runs/demo"),
    ("report", "json_file"): (Kind.OUTPUT, "out.json"),
    ("report", "png_file"): (Kind.OUTPUT, "out.png"),
    ("profile", "model"): (Kind.DIRECTORY, "model"),
    ("profile", "name"): (Kind.WORD, ""),
    ("profile", "tp_degrees"): (Kind.NUMBER, ""),
    ("profile", "windows"): (Kind.NUMBER, ""),
    ("profile", "shards"): (Kind.WORD, ""),
    ("profile", "draft_models"): (Kind.WORD, ""),
    ("evaluate", "checkpoint"): (Kind.RUN, "runs/demo"),
    ("evaluate", "data"): (Kind.FILE, "validation.parquet"),
    ("evaluate", "config"): (Kind.FILE, "train.yaml"),
    ("evaluate", "name"): (Kind.WORD, ""),
    ("evaluate", "json"): (Kind.OUTPUT, "out.json"),
    ("doctor", "json_file"): (Kind.OUTPUT, "out.json"),
    ("simulate", "trace"): (Kind.FILE, "trace.parquet"),
    ("simulate", "paper"): (Kind.WORD, ""),
    ("simulate", "profile"): (Kind.FILE, "profile.json"),
    ("simulate", "hardware"): (Kind.WORD, ""),
    ("simulate", "shape"): (Kind.WORD, ""),
    ("simulate", "policies"): (Kind.WORD, ""),
    ("simulate", "steps"): (Kind.NUMBER, ""),
    ("simulate", "out"): (Kind.MADE, "pictures"),
    ("simulate", "json"): (Kind.OUTPUT, "out.json"),
    ("export", "run"): (Kind.RUN, "runs/demo"),
    ("export", "file"): (Kind.OUTPUT, "out.parquet"),
    ("export", "events"): (Kind.OUTPUT, "out.json"),
    ("export", "page"): (Kind.OUTPUT, "out.html"),
    ("data", "name"): (Kind.FILE, "rows.jsonl"),
    ("data", "sets"): (Kind.WORD, ""),
    ("data", "difficulty"): (Kind.NUMBER, ""),
    ("data", "files"): (Kind.FILE, "rows.jsonl"),
    ("data", "out"): (Kind.MADE, "made"),
    ("data", "revision"): (Kind.WORD, ""),
    ("data", "split"): (Kind.WORD, ""),
    ("data", "subset"): (Kind.WORD, ""),
    ("data", "question"): (Kind.WORD, ""),
    ("data", "answer"): (Kind.WORD, ""),
    ("data", "data_source"): (Kind.WORD, ""),
    ("data", "instruction"): (Kind.WORD, ""),
    ("config", "config_file"): (Kind.FILE, "train.yaml"),
    ("config", "overrides"): (Kind.WORD, ""),
    ("drafter train", "model"): (Kind.DIRECTORY, "model"),
    ("drafter train", "data"): (Kind.FILE, "validation.parquet"),
    ("drafter train", "out"): (Kind.MADE, "made"),
    ("bench", "name"): (Kind.WORD, ""),
    ("bench", "args"): (Kind.WORD, ""),
}
"""Kind and good value of the arguments and options that are plain words to click."""

_RUNS_DIR = {"show", "samples", "sql", "report", "runs"}
"""Commands that read the runs' directory. The others create it if it is missing."""

GOOD: dict[str, dict[str, Any]] = {
    "train": {"config_file": "train.yaml", "check": True},
    "demo": {},
    "runs": {},
    "show": {"run": "demo"},
    "samples": {"run": "demo"},
    "sql": {"run": "demo", "query": "SELECT 1"},
    "report": {"run": "demo"},
    "profile": {"model": "model", "dtype": "float32", "max_context": "384"},
    "evaluate": {"checkpoint": "demo"},
    "ui": {},
    "doctor": {},
    "deploy": {},
    "simulate": {
        **{"trace": "trace.parquet", "engines": "2", "hardware": "H100", "shape": "Qwen3-8B"},
        "out": "pictures",
    },
    "export": {"run": "demo", "file": "out.parquet"},
    "data": {"name": "rows.jsonl", "out": "made"},
    "config": {"config_file": "train.yaml"},
    "drafter train": {
        **{"model": "model", "data": "validation.parquet", "out": "made"},
        **{"prompt_tokens": "128", "tokens": "16"},
    },
    "bench": {"name": "index"},
}
"""Good arguments of each command. A case replaces one of them by a hostile value."""
INSTEAD: dict[tuple[str, str], dict[str, Any]] = {
    ("train", "resume"): {"config_file": None},
    ("simulate", "paper"): {"trace": None, "engines": None, "hardware": None, "shape": None},
    ("simulate", "profile"): {"hardware": None, "shape": None},
    ("simulate", "divide"): {"engines": None, "out": None},
    ("data", "files"): {"name": "gsm8k"},
    ("data", "revision"): {"name": "gsm8k"},
    ("data", "question"): {"answer": "answer", "data_source": "math_dapo"},
    ("data", "answer"): {"question": "question", "data_source": "math_dapo"},
    ("data", "data_source"): {"question": "question", "answer": "answer"},
    ("export", "events"): {"file": None},
    ("export", "page"): {"file": None},
}
"""Changes to the good arguments that some parameters need. None leaves an argument out."""
ENVIRONMENT = {"deploy": {"PREFECT_API_URL": "http://127.0.0.1:9/api"}}


NOT_WRITTEN = (("deploy", "runs_dir"), ("doctor", "runs_dir"))
"""Directories that a command mentions but does not use, so faults there do not matter."""
WRITE_LATE = ("drafter train",)
"""Commands that write after long work only, so a full disk cannot stop their start."""
TOLD_OF = ("runs", "show")
"""Commands that show a run even if its files cannot be read, and name the files."""


@dataclass(frozen=True)
class Hostile:
    """A command line with one hostile value or fault."""

    what: str
    args: tuple[str, ...]
    value: str
    option: str
    fault: tuple[str, str, int] | None = None
    may_pass: bool = False
    """Whether the command may accept the value: some are good by chance."""
    request: dict[str, Any] = field(default_factory=dict)


def _flattened(commands: Mapping[str, click.Command], before: str = "") -> dict[str, click.Command]:
    """Return the commands by name. Those of a group have its name before theirs."""
    found: dict[str, click.Command] = {}
    for name, command in commands.items():
        if isinstance(command, click.Group):
            found |= _flattened(command.commands, f"{before}{name} ")
        else:
            found[before + name] = command
    return found


COMMANDS = _flattened(main.commands)


def parameters() -> Iterator[tuple[str, click.Parameter]]:
    for command, one in COMMANDS.items():
        for parameter in one.params:
            yield command, parameter


def kind_of(command: str, parameter: click.Parameter) -> tuple[Kind | None, str]:
    """Return the kind of a parameter, None for a flag, and a good value. Raise KeyError for a
    parameter that `DECLARED` lacks."""
    name, kind = str(parameter.name), parameter.type
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return None, ""
    if name == "runs_dir":
        return (Kind.DIRECTORY if command in _RUNS_DIR else Kind.MADE), "runs"
    if (command, name) in DECLARED:
        return DECLARED[command, name]
    if isinstance(kind, click.Choice):
        return Kind.WORD, ""
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return Kind.NUMBER, ""
    raise KeyError(f"what is hostile to {name} of refrain {command}? say it in DECLARED")


def command_line(command: str, name: str, value: str | None) -> list[str]:
    """Return a good command line with this value instead. None leaves the parameter out."""
    given = GOOD[command] | INSTEAD.get((command, name), {})
    if value is not None:
        given = given | {name: value}
    args, behind = command.split(), []
    for parameter in COMMANDS[command].params:
        found = given.get(str(parameter.name))
        if found is None:
            continue
        if isinstance(parameter, click.Argument):
            behind.append(found)
            continue
        option = max(parameter.opts, key=len)
        if found is True:
            args.append(option)
        elif name == "page" == parameter.name:
            args += [option, "1", found]
        else:
            # As a word of its own, a value that looks like an option would be one.
            args.append(f"{option}={found}")
    return [*args, "--", *behind] if behind and command != "bench" else [*args, *behind]


def option_of(parameter: click.Parameter) -> str:
    return max(parameter.opts, key=len)


def cases(place: HostilePlace, command: str) -> Iterator[Hostile]:
    """Yield all cases of a command. The files of a case exist while the caller handles it."""
    for parameter in COMMANDS[command].params:
        kind, good = kind_of(command, parameter)
        if kind is None:
            continue
        yield from _values(place, command, parameter, kind, Path(good).suffix)
        yield from _faults(place, command, parameter, kind, good)


def _values(
    place: HostilePlace, command: str, parameter: click.Parameter, kind: Kind, suffix: str
) -> Iterator[Hostile]:
    name, request = str(parameter.name), {"environment": ENVIRONMENT.get(command, {})}
    values: list[tuple[str, str]]
    if kind in PATHS:
        values = [(what, place.path(what, suffix)) for what in PATHS[kind]]
        if kind is Kind.FILE or kind is Kind.RUN:
            values.append(("nothing", ""))
    else:
        values = [(repr(v[:20]), v) for v in (NUMBERS if kind is Kind.NUMBER else WORDS)]
    for what, value in values:
        yield Hostile(
            what=f"{command} {name}: {what}",
            args=tuple(command_line(command, name, value)),
            value=value,
            option=option_of(parameter),
            may_pass=kind not in PATHS or what in MAY_PASS.get(kind, ()),
            request=request,
        )


MAY_PASS = {
    Kind.OUTPUT: ("a line break", "not UTF-8", "empty device"),
    Kind.MADE: ("no directory", "a line break", "not UTF-8"),
}
"""Paths that a command may accept."""


def _faults(
    place: HostilePlace, command: str, parameter: click.Parameter, kind: Kind, good: str
) -> Iterator[Hostile]:
    name = str(parameter.name)
    if (command, name) in NOT_WRITTEN:
        return
    for what, number in FAULTS.get(kind, ()):
        if what == "w" and command in WRITE_LATE:
            continue
        yield Hostile(
            what=f"{command} {name}: {errno.errorcode[number]} on {what}",
            args=tuple(command_line(command, name, good)),
            value=good,
            option=option_of(parameter),
            may_pass=what == "r" and command in TOLD_OF,
            fault=(str(place.directory / (good if kind in READ else "")), what, number),
            request={"environment": ENVIRONMENT.get(command, {})},
        )
