"""`refrain bench learning`: the runs that it makes, and its figures."""

import json
import math
from typing import get_args

import pytest
from click.testing import CliRunner

from refrain.benchmarks.learning import MODES, figures, interval, planned
from refrain.engines.store.store import Store
from refrain.flows.cli import main
from refrain.schemas.algorithm import AlgorithmType
from refrain.schemas.step import StepReport
from refrain.tasks.run.run_dir import STORE_FILE


def row(kind="grpo", mode="sync", seed=0, last=0.6, clipped=0.0) -> dict:
    return {
        "algorithm": kind,
        "mode": mode,
        "seed": seed,
        "last": last,
        "rise": last - 0.4,
        "clipped": clipped,
    }


def test_runs_cover_algorithms_and_modes_by_seed_once():
    runs = planned(get_args(AlgorithmType), seeds=3, pipelined_seeds=5)
    assert len(runs) == len(set(runs)) == len(get_args(AlgorithmType)) * 3 + 4 * 5 - 3
    for kind in get_args(AlgorithmType):
        assert {(kind, "sync", seed) for seed in range(3)} <= set(runs)
    assert {("grpo", m, s) for m in MODES for s in range(5)} <= set(runs)
    assert planned(["sapo"], seeds=2, pipelined_seeds=5) == [
        ("sapo", "sync", 0),
        ("sapo", "sync", 1),
    ]


def test_figures_are_the_least_rises_and_the_difference_paired_by_seed():
    rows = [
        row(seed=0, last=0.60),
        row(seed=1, last=0.70),
        row("gspo", last=0.45, clipped=0.3),
        row("gspo", seed=1, last=0.43, clipped=0.2),
        row(mode="pipelined", seed=1, last=0.66),
        row(mode="pipelined", seed=0, last=0.58),
        row(mode="stale_4", seed=1, last=0.69),
    ]
    found = figures(rows)
    assert found["rise_min_grpo"] == pytest.approx(0.2)
    assert found["rise_min_gspo"] == pytest.approx(0.03)
    assert found["rise_mean_gspo"] == pytest.approx(0.04)
    assert found["clipped_max_gspo"] == 0.3
    assert found["pipelined_less_sync"] == pytest.approx(-0.03)
    assert found["stale_4_less_sync"] == pytest.approx(-0.01)
    assert "stale_2_less_sync" not in found
    assert interval([0.1]) == (-math.inf, math.inf), "one seed gives no conclusion"
    # With one degree of freedom t is 12.706. The deviation is 0.01 * sqrt(2).
    assert found["pipelined_less_sync_high"] == pytest.approx(-0.03 + 12.706 * 0.01, abs=1e-4)


def test_runs_that_are_whole_are_read_and_not_made_again(tmp_path):
    kinds = ("sapo", "grpo")
    runs = planned(kinds, seeds=1, pipelined_seeds=1)
    for i, (kind, mode, seed) in enumerate(runs):
        directory = tmp_path / f"{kind}-{mode}-{seed}"
        directory.mkdir()
        summary = {"validation_first": 0.4, "validation_last": 0.5 + i / 100}
        (directory / "summary.json").write_text(json.dumps(summary))
        with Store(directory / STORE_FILE) as store:
            for step, clipped in ((1, i / 10), (2, 0.0)):
                metrics = {"actor/pg_clipfrac": clipped}
                report = StepReport(step=step, epoch=0, reward_mean=0, metrics=metrics, timing_s={})
                store.add_step(report)
    counts = ("--seeds", "1", "--pipelined-seeds", "1")
    arguments = [
        "bench",
        "learning",
        "--algorithms",
        *kinds,
        *counts,
        "--runs-dir",
        str(tmp_path),
        "--json",
        "-",
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(r["algorithm"], r["mode"], r["seed"]) for r in found["rows"]] == runs
    assert [r["clipped"] for r in found["rows"]] == [i / 10 for i in range(len(runs))]
    assert [r["rise"] for r in found["rows"]] == pytest.approx(
        [0.1 + i / 100 for i in range(len(runs))]
    )
