"""What `make release-check` finds wrong in texts and archives, without building any."""

import sys
from pathlib import Path
from typing import Any

import pytest

from infra.release_check import (
    NotReleasable,
    bare_environment,
    changelog_problems,
    citation_problems,
    commands_of,
    content_problems,
    copy_tracked,
    demo_command,
    licence_problems,
    metadata_problems,
    read_project,
    run,
)
from tests.conftest import REPOSITORY

PROJECT = read_project(REPOSITORY)
CHANGELOG = """
## [0.3.0] - 2026-12-01

### Train

- More.

### Scale

Of nodes:
- Fewer.

## [0.2.0] - unreleased

### Added
- This.

### Train
### Scale
- That.
"""
NOTICE = """Apache License
infra/demo/data   Apache-2.0 python -m infra.demo.build
infra/demo/model  Apache-2.0 python -m infra.demo.build
"""
DATA = ["infra/demo/data/train.parquet", "infra/demo/model/model.safetensors", "infra/demo/task.py"]
METADATA = f"""Metadata-Version: 2.4
Name: {PROJECT["name"]}
Version: {PROJECT["version"]}
License-Expression: {PROJECT["license"]}
Requires-Python: <3.14,>=3.11
Description-Content-Type: text/markdown

# refrain
"""
WHEEL = [
    "refrain/flows/cli.py",
    "refrain/flows/page.html",
    "refrain-1.dist-info/licenses/LICENSE",
    "refrain-1.dist-info/licenses/NOTICE",
]
TRACKED = ["flows/cli.py", "flows/page.html", "tests/test_docs.py", "README.md"]


def finds(problems: Any, *parts: str) -> None:
    """Assert that there is one problem for each part, in this order."""
    found = list(problems)
    assert len(found) == len(parts), found
    assert all(part in one for part, one in zip(parts, found, strict=True)), found


def test_changelog_needs_a_date_and_groups_with_entries() -> None:
    finds(changelog_problems(CHANGELOG, "0.3.0"))
    finds(
        changelog_problems(CHANGELOG, "0.2.0"),
        "0.2.0: no date",
        "`### Added` names no use",
        "`### Train` has no entry",
    )
    finds(changelog_problems(CHANGELOG, "0.3"), "no section `## [0.3] - DATE`")
    finds(changelog_problems("## [1.0.0] - 2026-12-01\nAll.\n", "1.0.0"), "no groups")


def test_data_needs_a_licence_that_names_it() -> None:
    finds(licence_problems(DATA, NOTICE))
    finds(licence_problems([*DATA, "infra/other/a.parquet"], NOTICE), "no licence of infra/other/a")
    finds(licence_problems(DATA[:1], NOTICE), "infra/demo/model: no data there")
    closed = NOTICE.replace("model  Apache-2.0", "model  CC-BY-NC-4.0")
    finds(licence_problems(DATA, closed), "infra/demo/model: give one of Apache-2.0")
    finds(licence_problems(DATA, "infra/demo Apache-2.0\n"), "infra/demo: give one of")


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        ("", "", []),
        (f"Version: {PROJECT['version']}", "Version: 9.9", ["version is '9.9'"]),
        (f"Version: {PROJECT['version']}", "Version: new", ["'new' is invalid"]),
        (">=3.11", ">=3.10", ["requires-python"]),
        ("# refrain", "", ["no description"]),
        ("text/markdown", "text/plain", ["not text/markdown"]),
    ],
)
def test_metadata_is_that_of_the_project(old: str, new: str, problems: list[str]) -> None:
    finds(metadata_problems(METADATA.replace(old, new), PROJECT), *problems)


def test_a_wheel_has_all_of_our_packages_and_no_tests() -> None:
    finds(content_problems(WHEEL, TRACKED))
    finds(content_problems(WHEEL[:1] + WHEEL[2:], TRACKED), "no flows/page.html")
    finds(content_problems([*WHEEL, "refrain/tests/a.py"], TRACKED), "is a test")
    finds(content_problems(WHEEL[:-1], TRACKED), "no NOTICE")


def test_a_citation_is_valid_and_of_this_version(tmp_path: Path) -> None:
    file, text = tmp_path / "CITATION.cff", (REPOSITORY / "CITATION.cff").read_text()
    file.write_text(text.replace("type: software", "type: cake"))
    project = PROJECT | {"version": "9.9"}
    finds(citation_problems(file, project), "not valid", "in pyproject.toml '9.9'")


def test_commands_are_read_from_a_groups_help() -> None:
    head = "Usage: refrain\n\n  A  tool.\n\n"
    listed = "Commands:\n  bench     Run\n  make-it   Do\n            more\n"
    assert commands_of(head + listed) == ["bench", "make-it"]
    assert commands_of("Options:\n  --help  Show") == []
    assert demo_command(["demo", "train"]) == ("demo",)
    assert demo_command(["train"])[0] == "train"


@pytest.mark.parametrize(
    ("code", "message"),
    [("print('no disk'); exit(1)", "no disk"), ("import time; time.sleep(9)", "took over")],
)
def test_a_command_that_fails_or_hangs_ends_the_check(
    code: str, message: str, tmp_path: Path
) -> None:
    env = bare_environment(Path(sys.executable).parent, tmp_path)
    with pytest.raises(NotReleasable, match=message):
        run(sys.executable, "-c", code, cwd=tmp_path, env=env, timeout_s=0.5)


def test_links_are_copied_as_links(tmp_path: Path) -> None:
    (tmp_path / "from" / "engines").mkdir(parents=True)
    (tmp_path / "from" / "link").symlink_to("engines")
    copy_tracked(tmp_path / "from", ["link"], tmp_path / "to")
    assert (tmp_path / "to" / "link").readlink() == Path("engines")
