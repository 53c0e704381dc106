"""`refrain simulate --paper pat` at reduced size: switching beside the paper's numbers."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from benchmarks.papers.pat import BEST, POINTS
from benchmarks.papers.present.switching import shortfalls, switching_figures
from benchmarks.papers.settings import PAT_SWITCHING, SETTINGS
from benchmarks.papers.switching import PRINTED_BASE, Runs
from benchmarks.papers.switching_study import ABLATION, CHANGES, StudyPlan, study_switching
from flows.cli import main

A40 = POINTS[0]
SMALL = StudyPlan(points=(A40, BEST), best=BEST, parts=(A40,), changes=CHANGES[:1], steps=(6,))
FIRST = replace(SETTINGS["pat"][0], switching=SMALL, steps=(1,))
NAMES = {
    "generation_reduction",
    "iteration_speedup",
    "uniform_switches",
    "over_best_static",
    "over_tp2",
    "joint_over_best_static",
}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SETTINGS, "pat", (FIRST,))


def refrain(*args):
    result = CliRunner().invoke(main, ["simulate", "--paper", "pat", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_figures_have_their_names(tmp_path):
    text = refrain("--json", "found.json", "--out", "out")
    found = json.loads((tmp_path / "found.json").read_text())
    figures = found["figures"]
    assert set(figures) >= NAMES
    assert figures["uniform_switches"] == 0
    assert figures["generation_reduction_over_tp2"] > figures["generation_reduction"]
    assert figures["static_tp2_s"] > figures["best_static_s"]
    points = [row for row in found["rows"] if "best_static_tp_degree" in row]
    assert {row["point"] for row in points} == {A40.name, BEST.name}
    assert {row.get("variant") for row in found["rows"]} >= {v.name for v in ABLATION}
    assert figures["over_best_static"] >= 0.99
    assert figures["over_tp2"] >= 1.05
    assert figures["joint_over_best_static"] >= 0.99
    assert sum("residual" in row for row in found["rows"]) == 8
    uneven = {(row["drafts"], row["uneven"]) for row in found["rows"] if "uneven" in row}
    assert uneven == {(d, of) for d in (False, True) for of in ("known", "history", "ranked")}
    assert figures["uneven_over_even_known"] > 0.95
    assert sum("most_over_static" in row for row in found["rows"]) == 4
    assert (tmp_path / "out" / "switching.png").stat().st_size > 10_000
    for line in text.splitlines():
        if " left (" in line or "uniform lengths" in line or "of forecasts" in line:
            assert "SIMULATION" in line
    assert "134.3" in text
    assert "to TP 8 with" in text


def test_only_requested_steps_are_simulated():
    assert "uniform lengths" not in refrain("--steps", "2")


def test_all_printed_figures_are_compared():
    assert PAT_SWITCHING.points == POINTS
    assert PAT_SWITCHING.best == BEST
    assert BEST in PAT_SWITCHING.parts
    assert len({point.name for point in POINTS}) == len(POINTS) == 21


@pytest.mark.slow
def test_only_shortfalls_are_reported():
    study = study_switching(replace(SMALL, points=(A40, BEST), changes=()), 0, lambda _: None)
    short = shortfalls(study)
    assert [line.split(":")[0] for line in short] == [
        f"below the paper ({BEST.name})",
        "in the way",
        f"below the paper ({BEST.name})",
    ]
    found = study.points[BEST]
    (run,) = found.pat[PRINTED_BASE].runs
    fast = Runs((replace(run, step_s=0.5 * found.static[8].seconds),))
    better = replace(found, pat={PRINTED_BASE: fast})
    good = replace(study, points={**study.points, BEST: better})
    assert shortfalls(good) == []
    figures = switching_figures(good)
    assert figures["generation_reduction"] == pytest.approx(0.5)
    rest_s = BEST.rest_s(found.steps.num_tokens)
    assert figures["iteration_speedup"] == pytest.approx(
        (found.static[8].seconds + rest_s) / (fast.seconds + rest_s)
    )
