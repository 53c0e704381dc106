"""What an engine compiles stays on its node, and the next engine there compiles nothing.

On a CPU vLLM 0.32 cannot load what it saves of a whole model (it says "no attribute
'finalize_loading'"), so the graph is traced again. The kernels, which take the time, are found.
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
    """Return the compiled kernels below a directory, and when each was made."""
    return {file.relative_to(root): file.stat().st_mtime_ns for file in root.rglob("*.so")}


def test_the_second_engine_of_a_node_compiles_nothing(tmp_path: Path) -> None:
    """Though it has another number, and directories of its own for what goes with it."""
    root, other = tmp_path / "one", tmp_path / "other"
    first = start(0, root)
    made = kernels(root)
    assert made
    second = start(1, root)
    assert kernels(root) == made

    assert first["TMPDIR"] != second["TMPDIR"]
    assert not Path(first["TMPDIR"]).exists(), "it goes with its engine"
    for place in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        assert first[place] == second[place]
        assert Path(first[place]).is_relative_to(root)

    start(1, other)
    assert len(kernels(other)) == len(made), "negative control: they are found nowhere else"
