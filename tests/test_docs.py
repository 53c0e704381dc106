"""What the README and docs/ point to is there."""

import re
import shlex
from pathlib import Path

import pytest

from flows.cli import main
from tests.conftest import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"^\s*refrain (.+?)(?:\s+#.*)?$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_are_known(page: Path) -> None:
    known = main.commands
    for line in COMMAND.findall(page.read_text()):
        name, *arguments = shlex.split(line)
        assert name in known, line
        options = {option for parameter in known[name].params for option in parameter.opts}
        given = {argument for argument in arguments if argument.startswith("--")}
        # A bench has options of its own.
        assert name == "bench" or given <= options, line
