"""Code blocks of the pages: each one is run or read here, or marked as not to be run.

text     a diagram or an output: not run
python   run, unless the line before it says `<!-- not run: REASON -->`
yaml     settings: the config accepts them
bash     its targets of make and its files exist; tests/test_docs.py knows the commands of refrain
sql      run on the store of a run
diff     applied and run by tests/test_change_page.py
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from refrain.engines.store.reader import answer
from refrain.engines.store.store import Store
from refrain.schemas.config import TrainConfig
from tests.conftest import REPOSITORY
from tests.test_docs import PAGES

FENCE = re.compile(
    r"(?P<mark><!-- not run: [^>\n]+ -->\n\n?)?^(?P<indent> *)```(?P<language>[^\n]*)\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
LANGUAGES = {"bash", "diff", "json", "python", "sql", "text", "yaml"}
REQUIRED = {"model": {"path": "m"}, "data": {"train": ["d"]}}


class Block(NamedTuple):
    """A code block of a page."""

    page: Path
    language: str
    code: str
    is_marked: bool


def blocks(*languages: str) -> Iterator[Block]:
    for page in PAGES:
        for found in FENCE.finditer(page.read_text()):
            if not languages or found["language"] in languages:
                yield Block(page, found["language"], found["code"], bool(found["mark"]))


def params(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.page.stem) for block in blocks(*languages)]


def merged(one: Any, other: Any) -> Any:
    """Return nested dicts with the values of both; the other one's win."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return other
    return one | {name: merged(one.get(name), value) for name, value in other.items()}


def test_every_block_has_a_known_language() -> None:
    unknown = [f"{one.page}: {one.language!r}" for one in blocks() if one.language not in LANGUAGES]
    assert unknown == [], "write ```text for a diagram or an output"


@pytest.mark.parametrize("block", params("python"))
def test_python_runs(block: Block) -> None:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if block.is_marked else 0
    code = compile(block.code, str(block.page), "exec", flags)
    if not block.is_marked:
        exec(code, {})


@pytest.mark.parametrize("block", params("yaml"))
def test_a_config_accepts_the_settings(block: Block) -> None:
    TrainConfig.model_validate(merged(REQUIRED, yaml.safe_load(block.code)))


@pytest.mark.parametrize("block", params("json"))
def test_json_is_read(block: Block) -> None:
    assert json.loads(block.code)


@pytest.mark.parametrize("block", params("sql"))
def test_sql_runs(block: Block, tmp_path: Path) -> None:
    store = tmp_path / "refrain.duckdb"
    Store(store).close()
    for query in filter(str.strip, block.code.split(";")):
        assert answer(store, query, 10.0).num_rows == 0


@pytest.mark.parametrize("block", params("bash"))
def test_targets_and_files_exist(block: Block) -> None:
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"^\s*make ([a-z-]+)", block.code, re.MULTILINE)} <= {*targets}
    files = re.findall(r"(?<![\w./-])((?:infra|examples|tests)/[\w./-]+\.\w+)", block.code)
    ignored = (REPOSITORY / ".gitignore").read_text().splitlines()
    missing = [file for file in files if not (REPOSITORY / file).exists()]
    assert [file for file in missing if f"/{file}" not in ignored] == []
