"""Rules that no tool checks: lengths of files and functions, unique names of classes, and imports
from `refrain`."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

FOLDERS = ("schemas", "engines", "tasks", "flows", "benchmarks", "infra")
MAX_FILE_LINES = 410
MAX_FUNCTION_LINES = 60
Rule = Callable[[Sequence[Path]], Iterator[str]]


def long_files(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        num_lines = len(file.read_text().splitlines())
        if num_lines > MAX_FILE_LINES:
            yield f"{file}: {num_lines} lines"


def long_functions(files: Sequence[Path]) -> Iterator[str]:
    for file, node in nodes(files):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{file}:{node.lineno}: {node.name} has {num_lines} lines"


def shared_class_names(files: Sequence[Path]) -> Iterator[str]:
    homes = defaultdict(list)
    for file, node in nodes(files):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            homes[node.name].append(str(file))
    for name, places in homes.items():
        if len(places) > 1:
            yield f"{name}: {', '.join(places)}"


def imports_past_refrain(files: Sequence[Path]) -> Iterator[str]:
    """A checkout has each module twice, as `engines.x` and as `refrain.engines.x`. Whoever imported
    both would have two of each class."""
    for file, node in nodes(files):
        modules = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            if module.partition(".")[0] in FOLDERS[:5]:
                yield f"{file}:{node.lineno}: import refrain.{module}"


RULES = {
    long_files: FOLDERS,
    long_functions: FOLDERS,
    shared_class_names: FOLDERS,
    imports_past_refrain: (*FOLDERS, "examples", "tests"),
}


def nodes(files: Sequence[Path]) -> Iterator[tuple[Path, ast.AST]]:
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            yield file, node


@pytest.mark.parametrize(("rule", "folders"), RULES.items())
def test_the_source_obeys(rule: Rule, folders: Sequence[str]) -> None:
    files = [file for folder in folders for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    assert len(files) > 100
    assert list(rule(files)) == []


@pytest.mark.parametrize(
    ("rule", "one", "other"),
    [
        (long_files, "\n" * 411, ""),
        (long_functions, "def f():\n" + "    pass\n" * 60, "async def g():\n" + "    pass\n" * 59),
        (shared_class_names, "class A: ...", "class B:\n    class A: ..."),
        (imports_past_refrain, "import flows.cli", "import refrain.flows.cli"),
        (imports_past_refrain, "from tasks import rollout", "from tests import tasks"),
    ],
)
def test_rule_names_the_offending_file(rule: Rule, one: str, other: str, tmp_path: Path) -> None:
    names = ("one.py", "other.py")
    for name, text in zip(names, (one, other), strict=True):
        (tmp_path / name).write_text(text + "\n")
    (complaint,) = rule([tmp_path / name for name in names])
    assert str(tmp_path / "one.py") in complaint
