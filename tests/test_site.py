"""The documentation is built as a site, without a warning: links and anchors lead somewhere."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(
    find_spec("mkdocs") is None and os.environ.get("CI") != "true",
    reason="mkdocs-material is not installed: make setup",
)
BROKEN = """
[page](nowhere.md) [anchor](README.md#nowhere) [source](../nowhere.py) [folder](../docs)

A list after text:
- one
- two
"""


def build(tree: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)],
        cwd=tree,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120.0,
    )


def test_it_is_built_without_warnings(tmp_path: Path) -> None:
    done = build(REPOSITORY, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for name in ("index.html", "docs/history.html", "docs/api.html", "flows/step.py"):
        assert (tmp_path / name).is_file(), name
    assert "<table>" in (tmp_path / "docs" / "configuration.html").read_text()


def test_what_is_broken_is_named(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("docs", "examples", "infra"):
        (tree / name).mkdir(parents=True)
    config = (REPOSITORY / "mkdocs.yml").read_text()
    (tree / "mkdocs.yml").write_text(config.partition("\nnav:")[0])
    shutil.copy(REPOSITORY / "infra" / "docs_site.py", tree / "infra")
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/README.md"):
        (tree / name).write_text("# Page\n")
    (tree / "docs" / "broken.md").write_text(BROKEN)
    done = build(tree, tmp_path / "site")
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 4, done.stderr
    for name in ("nowhere.md", "#nowhere", "nowhere.py", "../docs"):
        assert any(f"'{name}'" in line for line in warnings), name
    assert "<li>two</li>" in (tmp_path / "site" / "docs" / "broken.html").read_text()
