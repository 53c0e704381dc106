"""vLLM's configuration and choice of CUDA graphs on a GPU, from refrain's arguments.

All of it is computed without a GPU.
"""

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from refrain.engines.inference.engine.graphs import MOST_TOKENS, capture_sizes
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def resolved() -> dict[str, Any]:
    """Run `gpu_path` in a process where vLLM believes that it is the CUDA build."""
    command = [sys.executable, "-m", "tests.inference.gpu_path"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["off", "on", "in turn", "pooled"])
def test_engines_have_vllms_own_path(resolved: dict[str, Any], kind: str) -> None:
    of = resolved[kind]
    assert (of["device"], of["v2_runner"], of["extended"]) == ("cuda", False, True)
    assert of["step_tokens"] == 8192
    assert of["graphs"] == "FULL_AND_PIECEWISE"
    assert of["sleeps"] is (kind in ("in turn", "pooled"))


def test_memory_and_the_head_are_as_they_were_asked_for(resolved: dict[str, Any]) -> None:
    assert (resolved["on"]["memory_share"], resolved["pooled"]["memory_share"]) == (0.92, 0.4)
    assert resolved["on"]["head_dtype"] == "torch.bfloat16"
    assert resolved["pooled"]["head_dtype"] == "torch.float32"


def test_engines_of_a_plan_that_is_accepted_start(resolved: dict[str, Any]) -> None:
    """Negative control: with vLLM's default share, fewer than 70 % of the engines would start."""
    memory = resolved["memory"]
    assert memory["accepted"] > 300
    assert memory["refused"] > 300
    assert memory["started"] == memory["engines"]
    assert memory["started by default"] < 0.7 * memory["engines"]


def test_without_drafting_nothing_is_another(resolved: dict[str, Any]) -> None:
    off = resolved["off"]
    assert off["async_scheduling"] is True
    assert off["num_draft_tokens"] == 0
    assert off["worker"] == "vllm.v1.worker.gpu_worker.Worker"
    assert {mode for mode, _ in off["dispatched"]["plain"].values()} == {"FULL"}


def test_drafts_cost_asynchronous_scheduling(resolved: dict[str, Any]) -> None:
    """docs/decisions/5-step-path.md says why. This test fails once vLLM no longer requires it."""
    assert resolved["on"]["async_scheduling"] is False
    assert resolved["on"]["num_draft_tokens"] == 16
    assert resolved["on"]["worker"] == "refrain.engines.inference.engine.gpu_worker.DraftingWorker"


@pytest.mark.parametrize("kind", ["v2 off", "v2 on"])
def test_the_v2_runner_schedules_asynchronously_with_drafts_too(
    resolved: dict[str, Any], kind: str
) -> None:
    of = resolved[kind]
    assert (of["device"], of["v2_runner"], of["extended"]) == ("cuda", True, True)
    assert of["async_scheduling"] is True
    assert of["num_draft_tokens"] == (16 if kind == "v2 on" else 0)
    assert {mode for mode, _ in of["dispatched"]["plain"].values()} == {"FULL"}


@pytest.mark.parametrize("kind", ["on", "v2 on"])
def test_plain_decoding_has_full_graphs_with_drafting_on(
    resolved: dict[str, Any], kind: str
) -> None:
    plain = resolved[kind]["dispatched"]["plain"]
    assert plain == {
        "1": ["FULL", 1],
        "2": ["FULL", 2],
        "3": ["FULL", 4],
        "100": ["FULL", 104],
        "250": ["FULL", 256],
        "256": ["FULL", 256],
    }


@pytest.mark.parametrize("kind", ["on", "v2 on"])
def test_steps_with_drafts_have_piecewise_graphs(resolved: dict[str, Any], kind: str) -> None:
    drafted = resolved[kind]["dispatched"]["drafted"]
    modes = {int(num): mode for num, (mode, _) in drafted.items()}
    assert {mode for num, mode in modes.items() if num <= MOST_TOKENS} == {"PIECEWISE"}
    assert modes[1025] == "NONE"
    for num, (mode, padded) in drafted.items():
        assert mode == "NONE" or 0 <= padded - int(num) <= max(8, int(num) / 8)


@pytest.mark.parametrize("kind", ["on", "v2 on"])
def test_vllms_own_graphs_would_be_none_for_plain_decoding(
    resolved: dict[str, Any], kind: str
) -> None:
    """Negative control: without our capture sizes, plain decoding has no full graph."""
    dispatched = resolved[f"{kind}, vLLM's graphs"]["dispatched"]
    assert "FULL" not in {mode for mode, _ in dispatched["plain"].values()}
    assert dispatched["drafted"]["1000"][0] == "NONE"


@pytest.mark.parametrize(
    ("max_num_seqs", "step_tokens"), [(256, 8192), (8, 8192), (2048, 8192), (250, 300), (5, 3)]
)
def test_captured_sizes_end_where_they_should_and_leave_little_empty(
    max_num_seqs: int, step_tokens: int
) -> None:
    sizes = capture_sizes(max_num_seqs, step_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == min(step_tokens, max(MOST_TOKENS, max_num_seqs))
    assert min(max_num_seqs, step_tokens) in sizes
    assert all(b - a <= max(8, a / 8) for a, b in pairwise(sizes))
    assert len(sizes) <= 60
