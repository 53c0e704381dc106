"""One round of a real draft model, after a short and after a long text."""

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_round_traffic_is_independent_of_text_length(tmp_path):
    file = tmp_path / "rounds.json"
    command = [sys.executable, "-m", "flows.cli", "bench", "rounds", "--json", str(file)]
    # Enough to fill a block of the cache.
    command += ["--sequences", "2", "--rounds", "20"]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=500)
    figures = json.loads(file.read_text())["figures"]
    assert figures["num_hashed_tokens_1k"] == figures["num_hashed_tokens_16k"] == 0
    # Larger positions take one or two bytes more.
    assert figures["num_bytes_1k"] <= figures["num_bytes_16k"] < 1.1 * figures["num_bytes_1k"]
