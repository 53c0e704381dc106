"""On a machine without a GPU, `make gpu` ends and reports what each test lacks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from refrain.schemas.bench import BenchReport
from tests.conftest import REPOSITORY
from tests.gpu import record
from tests.gpu.needs import lacking

HERE = {"card": "A", "gpus": 1, "driver": "580", "torch": "2", "triton": "3", "vllm": None}


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process that sees no GPU."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "REFRAIN_GPU_REHEARSAL": ""},
        capture_output=True,
        text=True,
        timeout=120.0,
    )


def test_without_gpu_each_test_reports_what_it_lacked() -> None:
    before = record.RECORD.read_bytes() if record.RECORD.exists() else None
    done = run_pytest("tests/gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    (num_tests,) = re.findall(r"collected (\d+) items", done.stdout)
    told = re.findall(r"^(test_\w+\.py::\S.*?): (.+)$", done.stdout, re.MULTILINE)
    assert len(told) == int(num_tests) > 30
    assert {file for file, _, _ in (name.partition("::") for name, _ in told)} == {
        path.name for path in (REPOSITORY / "tests" / "gpu").glob("test_*.py")
    }
    assert not [name for name, why in told if not why.startswith("needs CUDA: ")]
    assert (record.RECORD.read_bytes() if record.RECORD.exists() else None) == before


def test_other_runs_of_tests_leave_it_out() -> None:
    others = [path for path in (REPOSITORY / "tests").iterdir() if path.name != "gpu"]
    ignored = [f"--ignore={path}" for path in others if path.name != "conftest.py"]
    done = run_pytest("--collect-only", "-q", "-n", "0", *ignored, "tests")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout


@pytest.mark.parametrize(
    ("what", "gpus", "rehearsed", "lacks"),
    [
        (("cuda", "json"), 2, True, ""),
        (("cuda", "vllm", "transformers", "numba", "triton"), 1, True, ""),
        (("cuda", "nowhere", "nor_here"), 1, True, "nowhere: not installed; nor_here: not"),
        (("cuda",), 1, False, "CUDA: a CPU cannot stand in"),
    ],
)
def test_in_a_rehearsal_a_cpu_stands_in(what, gpus, rehearsed, lacks) -> None:
    told = lacking(what, gpus, rehearsed, rehearsal=True)
    assert told.startswith(lacks)
    assert bool(told) == bool(lacks)


def test_recording_keeps_figures_of_other_machines(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    record.write(file, HERE | {"card": "B"}, {"b_ms": 1.0})
    record.write(file, HERE, {"a_ms": 2.0, "c_ms": 3.0})
    record.write(file, HERE, {"a_ms": 4.0})
    report = BenchReport.model_validate_json(file.read_text())
    assert report.figures == {"a_ms": 4.0, "c_ms": 3.0}
    assert [(row["card"], row["figure"], row["value"]) for row in report.rows] == [
        ("A", "a_ms", 4.0),
        ("A", "c_ms", 3.0),
        ("B", "b_ms", 1.0),
    ]
    assert report.versions == {"torch": "2", "triton": "3"}
