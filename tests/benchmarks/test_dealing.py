"""Prompts dealt to engines by tokens and by passes, on made-up runs."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from engines.store.rows import rollout_rows
from engines.store.store import Store
from flows.cli import main
from schemas.counts import DraftingCounts
from schemas.rollout import Split
from schemas.step import EngineShare, RolloutBatch
from tests.store.test_store import make_rollout

COSTS = (1e-2, 1e-3, 1e-3, 1e-7, 1e-4, 1e-5)


def make_run(path: Path, num_epochs: int = 3, costs: tuple[float, ...] = COSTS) -> Path:
    """Make a run with responses of 100 tokens. Every other prompt accepts few drafts."""
    with Store(path) as store:
        for epoch in range(num_epochs):
            rollouts = [
                make_rollout(
                    epoch + 1, f"p{prompt:02}", i, tokens=100, accepted=80 - prompt % 2 * 70
                )
                for prompt in range(16)
                for i in range(2)
            ]
            store.add_rollouts(rollout_rows(rollouts), epoch)
            store.add_stage(batch_of(epoch + 1, costs))
    return path


def batch_of(step: int, costs: tuple[float, ...]) -> RolloutBatch:
    counts = DraftingCounts(step_costs=costs)
    share = EngineShare(engine=0, num_rollouts=32, num_tokens=3200, busy_s=1.0, drafting=counts)
    return RolloutBatch(
        split=Split.TRAIN,
        step=step,
        policy_version=0,
        num_rollouts=32,
        num_tokens=3200,
        mean_response_tokens=100.0,
        max_response_tokens=100,
        clip_ratio=0.0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        generation_s=1.0,
        sync_s=0.0,
        canary_error=None,
        shares=(share,),
    )


def bench(*arguments: str):
    return CliRunner().invoke(main, ["bench", "dealing", *arguments])


def test_dealing_by_passes_evens_out_different_acceptances(tmp_path):
    path = make_run(tmp_path / "refrain.duckdb")
    out = tmp_path / "found.json"
    arguments = ("--prompts=16", "--steps=5", "--json", str(out))
    result = bench(str(path), *arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    figures = found["figures"]
    assert {row["epoch"] for row in found["rows"]} == {2, 3}
    # All prompts have the same number of tokens, so tokens cannot tell the slow ones apart.
    assert figures["tokens_sums_2"] > 0.05
    assert figures["tokens_correlation"] == 0.0
    for by in ("passes", "known"):
        assert figures[f"{by}_sums_2"] == pytest.approx(0.0, abs=1e-9)
    assert figures["passes_correlation"] == pytest.approx(1.0)
    assert figures["passes_error"] < figures["tokens_error"] / 1.5
    assert figures["speedup_2"] == pytest.approx(figures["known_speedup_2"])
    assert figures["speedup_2"] > 1.01


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"num_epochs": 1}, (), "less than two epochs"),
        ({"costs": ()}, (), "no engine measured its steps"),
        ({}, ("--engines=1,4",), "--engines '1,4' must list numbers from 2 on"),
        ({}, ("--prompts=0",), "--prompts 0: give at least 1"),
    ],
)
def test_unsuitable_runs_are_refused(tmp_path, changes, arguments, message):
    path = make_run(tmp_path / "refrain.duckdb", **changes)
    result = bench(str(path), *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_a_trace_has_no_passes(tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"")
    result = bench(str(tmp_path / "t.parquet"))
    assert result.exit_code == 2
    assert "a trace does not have passes" in result.output
