"""Links, settings and commands in the README, docs/ and examples/ exist, versions agree, and
screenshots are not old."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest

from infra.release_check import check_text, read_project, tracked_files
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
PICTURE = re.compile(r"!\[[^]]*\]\(([\w.]+\.png)\)")
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


def test_the_package_its_citation_its_licences_and_the_changelog_agree() -> None:
    found = check_text(REPOSITORY, tracked_files(REPOSITORY))
    # A section of the changelog gets its date on the day of the release.
    assert [problem for problem in found if "no date" not in problem] == []
    assert read_project(REPOSITORY)["version"] == VERSION
    assert "Apache License" in (REPOSITORY / "LICENSE").read_text()


def test_screenshots_are_of_this_version_or_the_one_before() -> None:
    taken = json.loads((REPOSITORY / "docs" / "pictures.json").read_text())
    shown = {(page.name, link) for page in PAGES for link in PICTURE.findall(page.read_text())}
    screenshots = {(one["page"], one["picture"]) for one in taken}
    assert screenshots <= shown, "a picture that no page shows"
    assert {one for one in shown if one[0] == "ui.md"} <= screenshots
    version = read_project(REPOSITORY)["version"]
    old = [one["picture"] for one in taken if is_old(one["version"], version)]
    assert old == [], "take them anew: make pictures"


def is_old(taken: str, current: str) -> bool:
    """Return whether a picture is of another major version, or of more than one minor before."""
    (major, minor, *_), (now, minor_now, *_) = (
        [int(part) for part in version.split(".")[:2]] for version in (taken, current)
    )
    return major != now or minor_now - minor > 1


@pytest.mark.parametrize(
    ("taken", "current", "old"),
    [
        ("0.2.0", "0.2.0", False),
        ("0.2.9", "0.3.0", False),
        ("0.2.9", "0.4.0", True),
        ("0.9.0", "0.10.1", False),
        ("0.9.0", "1.0.0", True),
    ],
)
def test_a_picture_is_old_after_two_minor_versions(taken: str, current: str, old: bool) -> None:
    assert is_old(taken, current) == old
