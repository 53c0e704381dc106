"""`refrain simulate --paper pat` at reduced size: switching beside the paper's numbers."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from refrain.benchmarks.papers.pat import BEST, POINTS
from refrain.benchmarks.papers.present.switching import switching_figures
from refrain.benchmarks.papers.settings import SETTINGS
from refrain.benchmarks.papers.switching import PRINTED_BASE, Runs, compare_points
from refrain.flows.cli import main

A40 = POINTS[0]
(SETTING,) = SETTINGS["pat"]
SMALL = replace(SETTING, switching=(BEST,), switching_steps=(6,), steps=(1,))
NAMES = {"generation_reduction", "iteration_speedup", "over_best_static", "over_tp2"}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SETTINGS, "pat", (SMALL,))


def refrain(*args):
    result = CliRunner().invoke(main, ["simulate", "--paper", "pat", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_figures_have_their_names(tmp_path):
    text = refrain("--json", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    figures = found["figures"]
    assert set(figures) >= NAMES
    assert figures["generation_reduction_over_tp2"] > figures["generation_reduction"]
    assert figures["static_tp2_s"] > figures["best_static_s"]
    points = [row for row in found["rows"] if "best_static_tp_degree" in row]
    assert {row["point"] for row in points} == {BEST.name}
    assert figures["over_best_static"] >= 0.99
    assert figures["over_tp2"] >= 1.05
    assert "SIMULATION PAT" in text
    assert "1.37" in text


def test_only_requested_steps_are_simulated():
    assert "SIMULATION PAT" not in refrain("--steps", "2")


@pytest.mark.slow
def test_gains_are_over_the_best_static_degree():
    found = compare_points((A40, BEST), (6,), 0, lambda _: None)[BEST]
    (run,) = found.pat[PRINTED_BASE].runs
    fast = Runs((replace(run, step_s=0.5 * found.static[8].seconds),))
    figures = switching_figures({BEST: replace(found, pat={PRINTED_BASE: fast})})
    assert figures["generation_reduction"] == pytest.approx(0.5)
    rest_s = BEST.rest_s(found.steps.num_tokens)
    assert figures["iteration_speedup"] == pytest.approx(
        (found.static[8].seconds + rest_s) / (fast.seconds + rest_s)
    )
