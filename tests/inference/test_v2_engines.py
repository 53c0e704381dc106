"""Real engines on vLLM's V2 runner, without a GPU."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.inference.v2_engines import ENV

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("cases", ["v2_kv_cases", "v2_tp_cases"])
def test_engines_on_the_v2_runner(cases):
    """Triton's interpreter must be on before Python starts."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", f"tests/inference/{cases}.py"],
        cwd=REPOSITORY,
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        timeout=490.0,
    )
    assert done.returncode == 0, done.stdout[-4000:]
