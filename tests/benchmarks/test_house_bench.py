"""`refrain bench house` counts this repository's source and prose."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from refrain.benchmarks.house import ROOT, docstrings_of, imports_back, share_of, words_per_sentence
from refrain.flows.cli import main


def test_it_counts_this_repository(tmp_path: Path) -> None:
    file = tmp_path / "house.json"
    done = CliRunner().invoke(main, ["bench", "house", "--no-engine", f"--json={file}"])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    files = [one.read_text().splitlines() for one in (ROOT / "engines").rglob("*.py")]
    assert report["figures"]["engines_lines"] == sum(map(len, files))
    assert {"rollout", "learn"} <= {row["room"] for row in report["rows"]}
    assert "roll_out_to_vllm_calls" not in report["figures"]


@pytest.mark.engine
@pytest.mark.slow
def test_a_request_reaches_vllm_in_a_dozen_calls(tmp_path: Path) -> None:
    file = tmp_path / "house.json"
    command = [sys.executable, "-m", "refrain.flows.cli", "bench", "house", f"--json={file}"]
    subprocess.run(command, check=True, timeout=280)
    report = json.loads(file.read_text())
    path = report["rows"][-1]["roll_out_to_vllm"]
    assert path[0] == "engines/rollout/coordinator.py:Coordinator.roll_out"
    assert path[-1] == "engines/inference/engine/admission.py:admit"
    assert report["figures"]["roll_out_to_vllm_calls"] == len(path) <= 12


@pytest.mark.parametrize(
    ("imports", "back"),
    [
        ({"a": ["b", "c"], "b": ["c"], "c": []}, []),
        ({"a": ["b"], "b": ["a"]}, [("a", "b"), ("b", "a")]),
        ({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": []}, [("a", "b"), ("b", "c"), ("c", "a")]),
    ],
)
def test_an_import_that_closes_a_cycle_is_counted(
    imports: dict[str, list[str]], back: list[tuple[str, str]]
) -> None:
    rows = [{"room": room, "imports": others} for room, others in imports.items()]
    assert imports_back(rows) == back


def test_code_tables_and_links_are_no_prose() -> None:
    prose = "# A title\n\nTwo words. [Three](x.md) words here.\n\n"
    page = prose + "```bash\na b c d e. f\n```\n\n| a | b c d |\n"
    assert words_per_sentence([page]) == 2.5
    assert share_of("what", ["What it is", "a b"]) == 0.2


def test_docstrings_of_fields_are_prose(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text('"""Module."""\nclass A:\n    x = "no"\n    """Field."""\n    print("no")\n')
    assert list(docstrings_of(file)) == ["Module.", "Field."]
