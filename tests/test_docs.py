"""Links, settings and commands in the README, docs/ and examples/ exist, and versions agree."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml

from refrain.flows.cli import main
from refrain.schemas.config import TrainConfig
from refrain.schemas.removed_settings import RENAMED
from refrain.schemas.settings import declared_settings
from refrain.schemas.version import VERSION
from tests.conftest import REPOSITORY

PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "examples").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
SETTINGS = {setting.name for setting in declared_settings(TrainConfig)}
SECTIONS = sorted({name.partition(".")[0] for name in SETTINGS if "." in name})
NAMED = re.compile(rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})\.[a-z_.]*[a-z_]\b(?![\w/(])")
FILES = (".md", ".py", ".png")
CODE = re.compile(r"^ *```bash\n(.*?)```", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n.*?```", re.DOTALL | re.MULTILINE)
MAX_WORDS = 1500
UNREAD = {
    "configuration.md": "generated: one looks up a setting",
    "CHANGELOG.md": "a record that grows with each version",
}
"""Pages that nobody reads from start to end."""
COMMAND = re.compile(r"^\s*refrain (.+?)(?:\s+#.*)?$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_are_known(page: Path) -> None:
    text = PYTHON.sub("", page.read_text())
    named = {name for name in NAMED.findall(text) if not name.endswith(FILES)}
    # Only these may name settings that are gone.
    allowed = {old for one in RENAMED for old in one.old} if page.name == "stability.md" else set()
    unknown = named - SETTINGS - allowed
    assert sorted(unknown) == [] or page.name == "CHANGELOG.md", "unknown settings"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_are_known(page: Path) -> None:
    known = main.commands
    code = "\n".join(CODE.findall(page.read_text()))
    for line in COMMAND.findall(code):
        name, *arguments = shlex.split(line)
        assert name in known, line
        command = known[name]
        if isinstance(command, click.Group):
            command = command.commands[arguments[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        given = {argument for argument in arguments if argument.startswith("--")}
        # Each bench has its own options.
        assert name == "bench" or given <= options, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_read_in_some_minutes(page: Path) -> None:
    """A word has a letter or a digit, so borders of tables are none."""
    num_words = sum(any(map(str.isalnum, word)) for word in page.read_text().split())
    assert num_words <= MAX_WORDS or page.name in UNREAD, f"{num_words} words: split the page"


def test_the_package_and_its_citation_agree() -> None:
    file = REPOSITORY / "CITATION.cff"
    schema = "--builtin-schema=vendor.citation-file-format"
    command = [sys.executable, "-m", "check_jsonschema", schema, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stdout + done.stderr
    citation = yaml.safe_load(file.read_text())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert [citation[name] for name in ("version", "license")] == [
        project[name] for name in ("version", "license")
    ]
    assert citation["authors"] == project["authors"]
    assert project["version"] == VERSION
    assert "Apache License" in (REPOSITORY / "LICENSE").read_text()
    assert f"## [{project['version']}]" in (REPOSITORY / "CHANGELOG.md").read_text()
