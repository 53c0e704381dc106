"""The environment in which vLLM's V2 runner works on a CPU: Triton's interpreter runs its kernels.

It must be set before a process starts, so tests run such cases in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.inference.interpreted.interpreted_triton.asynchronous import ASYNCHRONOUS

BACKEND = Path(__file__).parent / "interpreted"


def interpreted_env(*, asynchronous: bool, **more: str) -> dict[str, str]:
    """Return environment variables. `asynchronous`: schedule as vLLM does on a GPU."""
    path = [str(REPOSITORY), str(BACKEND), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(path)}
    return os.environ | own | {ASYNCHRONOUS: str(int(asynchronous))} | more


def run_cases(name: str, timeout_s: float, *, asynchronous: bool, **env: str) -> None:
    """Run the tests of `tests/inference/{name}.py` so. Raise AssertionError if some fail."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", Path(__file__).parent / f"{name}.py"],
        cwd=REPOSITORY,
        env=interpreted_env(asynchronous=asynchronous, **env),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
