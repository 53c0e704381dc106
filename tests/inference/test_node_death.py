"""A node of a cluster dies in the middle of a step, and the run goes on with the other node.

No GPUs are needed: the test tells Ray how many each node has.
"""

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["node", "raylet", "vllm"])
def test_a_step_and_the_next_go_on_with_what_is_left(kind):
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.node_death", kind],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Ray prints lines of its own when a raylet dies.
    (said,) = (line for line in done.stdout.splitlines() if line.startswith('{"nodes"'))
    what = json.loads(said)
    assert what["nodes"] == 2
    assert what["identical"]
    assert what["restarts"] == 1
    assert what["stage_s"] < 60.0
    (said,), (known_s,) = what["said"], what["known_s"]
    doomed = what["doomed"]
    assert said == (
        f"rollout engine {doomed} died: a node of the cluster is dead, and no other has 1 free "
        "GPUs for it; going on with 1 of 2 engines"
    )
    assert known_s < 60.0
    assert what["left"] == [1 - doomed]
