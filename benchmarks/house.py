"""The size of the source, and how its prose reads: symptoms to look at, not goals.

    refrain bench house --json house.json

    engines_lines, benchmarks_lines, tests_lines   lines of Python below each folder
    classes                    classes in the source, tests and benchmarks aside
    settings                   settings of a training run
    imports_back               imports between rooms of `engines` that close a cycle
    docs_words_per_sentence    in README.md and docs/, without code and tables
    what_per_1000_words        the word "what", in docstrings, README.md and docs/
    docs_words, readme_words   words, code and tables included
    roll_out_to_vllm_calls     functions between a stage's `roll_out` and vLLM, traced in a rollout
                               on a real engine (`roll_out_path`)

Each row is a room of `engines`: its lines, its classes, and the rooms that it imports. The last row
has the functions between `roll_out` and vLLM.
"""

import ast
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from rich.console import Console

from refrain.benchmarks.laps import Measured, Row
from refrain.benchmarks.roll_out_path import roll_out_path
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport
from refrain.schemas.config import TrainConfig
from refrain.schemas.settings import declared_settings

PACKAGES = ("refrain-rl", "ray", "vllm")
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ("engines", "tasks", "flows", "schemas")
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
SENTENCE = re.compile(r"[.!?:](?:\s|$)|\n\s*\n")
NO_PROSE = re.compile(r"(?s:```.*?```)|^\|.*$|^#.*$|!?\[|\]\([^)]*\)|`[^`]*`", re.MULTILINE)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--no-engine",
        action="store_true",
        help="start no engine: leave out roll_out_to_vllm_calls, which takes a minute",
    )


def measure(args: Namespace, console: Console) -> Measured:
    del console
    readme = ROOT / "README.md"
    pages = [readme, *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text() for page in pages]
    source = python_files(*SOURCE)
    docstrings = [text for file in source for text in docstrings_of(file)]
    prose = [*docstrings, *(NO_PROSE.sub("", text) for text in texts)]
    rows = rooms()
    figures: dict[str, int | float] = {
        "engines_lines": lines("engines"),
        "benchmarks_lines": lines("benchmarks"),
        "tests_lines": lines("tests"),
        "classes": num_classes(source),
        "settings": len(list(declared_settings(TrainConfig))),
        "imports_back": len(imports_back(rows)),
        "docs_words_per_sentence": words_per_sentence(texts),
        "what_per_1000_words": share_of("what", prose) * 1000,
        "docs_words": sum(len(text.split()) for text in texts[1:]),
        "readme_words": len(texts[0].split()),
    }
    if args.no_engine:
        return figures, rows
    path = roll_out_path()
    return figures | {"roll_out_to_vllm_calls": len(path)}, [*rows, {"roll_out_to_vllm": path}]


def python_files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def lines(folder: str) -> int:
    return sum(len(file.read_text().splitlines()) for file in python_files(folder))


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


def num_classes(files: Sequence[Path]) -> int:
    return sum(isinstance(node, ast.ClassDef) for file in files for node in nodes(file))


def docstrings_of(file: Path) -> Iterator[str]:
    """Yield docstrings of modules, classes, functions and fields."""
    for node in nodes(file):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield text


def words_per_sentence(texts: Sequence[str]) -> float:
    sentences = [
        WORD.findall(sentence)
        for text in texts
        for sentence in SENTENCE.split(NO_PROSE.sub("", text))
    ]
    lengths = [len(words) for words in sentences if len(words) > 1]
    return sum(lengths) / len(lengths)


def share_of(word: str, texts: Sequence[str]) -> float:
    words = [one.lower() for text in texts for one in WORD.findall(text)]
    return words.count(word) / len(words)


def rooms() -> list[Row]:
    """Return a row for each folder of `engines`; `imports`: the other rooms that it imports."""
    found = []
    for room in sorted(folder.name for folder in (ROOT / "engines").iterdir() if folder.is_dir()):
        files = python_files(f"engines/{room}")
        if not files:
            continue
        imported = {name for file in files for name in rooms_imported(file)} - {room}
        found.append(
            {
                "room": room,
                "lines": lines(f"engines/{room}"),
                "classes": num_classes(files),
                "imports": sorted(imported),
            }
        )
    return found


def rooms_imported(file: Path) -> Iterator[str]:
    """Yield the folders of `engines` that a file imports from."""
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").removeprefix("refrain.").split(".")
            if parts[0] == "engines" and len(parts) > 1 and (ROOT / "engines" / parts[1]).is_dir():
                yield parts[1]


def imports_back(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the imports of a room by another that it imports itself, also by way of others."""
    imports = {row["room"]: row["imports"] for row in rows}
    return [
        (one, other)
        for one, others in imports.items()
        for other in others
        if one in _reached(imports, other)
    ]


def _reached(imports: Mapping[str, Sequence[str]], room: str) -> set[str]:
    """Return the rooms that a room imports, itself or by way of others."""
    found: set[str] = set()
    left = [room]
    while left:
        new = set(imports[left.pop()]) - found
        found |= new
        left += new
    return found


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("room", "lines", "classes", "imports", text=("room", "imports"))
    for row in report.rows:
        if "room" in row:
            table.add_row(
                row["room"], f"{row['lines']:,}", f"{row['classes']}", " ".join(row["imports"])
            )
    console.print(table)
    for name, value in report.figures.items():
        console.print(
            f"{name:<26}{value:,.1f}" if isinstance(value, float) else f"{name:<26}{value:,}"
        )
    for row in report.rows:
        for number, function in enumerate(row.get("roll_out_to_vllm", ()), 1):
            console.print(f"{number:>4}  {function}")
