"""An engine's compiled kernels stay on its node, so the next engine there compiles nothing.

On a CPU, vLLM 0.32 cannot load a compiled model that it saved ("no attribute 'finalize_loading'"),
so it traces the graph again. It does find the kernels, which take most of the time.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def start(index: int, root: Path) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.compiling", str(index)],
        cwd=REPOSITORY,
        env={**os.environ, "VLLM_CACHE_ROOT": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def kernels(root: Path) -> dict[Path, int]:
    """Return the compiled kernels below a directory, with their modification times."""
    return {file.relative_to(root): file.stat().st_mtime_ns for file in root.rglob("*.so")}


def test_the_second_engine_of_a_node_compiles_nothing(tmp_path: Path) -> None:
    """The second engine has another index, and a temporary directory of its own."""
    root, other = tmp_path / "one", tmp_path / "other"
    first = start(0, root)
    made = kernels(root)
    assert made
    second = start(1, root)
    assert kernels(root) == made

    assert first["TMPDIR"] != second["TMPDIR"]
    assert not Path(first["TMPDIR"]).exists(), "the engine did not delete it"
    for place in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        assert first[place] == second[place]
        assert Path(first[place]).is_relative_to(root)

    start(1, other)
    assert len(kernels(other)) == len(made), "negative control: another root was not empty"
