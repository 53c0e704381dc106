"""`refrain simulate --paper specactor` at reduced size: each part beside the paper's number."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from benchmarks.papers.drafter_assumptions import PRINTS, Assumption
from benchmarks.papers.present.speculation import shortfalls, speculation_figures
from benchmarks.papers.settings import SETTINGS, Speculation
from benchmarks.papers.specactor import PARTS, simulate_speculation
from flows.cli import main
from schemas.simulate import ClusterLayout

(SETTING,) = SETTINGS["specactor"]
DAPO, GRPO = (
    spec.model_copy(
        update={"num_prompts": 64, "prompts_per_step": num, "group_size": 8, "num_steps": 8}
    )
    for spec, num in zip(SETTING.speculation.specs, (16, 8), strict=True)
)
GRID = (Assumption(1.0, 0.78), Assumption(0.5, 0.6))
SMALL = replace(
    SETTING,
    spec=DAPO,
    layout=ClusterLayout(num_engines=5, tp_degree=4),
    steps=(4,),
    speculation=Speculation(specs=(DAPO, GRPO), step=8, grid=GRID),
)
NAMES = {"decoupled_gain", "reconfiguration_gain", "best_of_n_gain", "bound_speedup"} | {
    *("ranked_speculation_speedup", "fused_speculation_speedup"),
    *("ranked_fused_speculation_speedup", "fused_bound_speedup"),
    *("even_ends_speculation_speedup", "even_ends_fused_speculation_speedup"),
    *("one_drafter_bound_speedup", "hindsight_speculation_speedup"),
}
ASKED = {"rollout_speedup", "over_coupled", "ranked_rollout_speedup", "grid_bound_speedup"} | {
    "even_ends_rollout_speedup"
}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SETTINGS, "specactor", (SMALL,))


def refrain(*args):
    result = CliRunner().invoke(main, ["simulate", "--paper", "specactor", *args])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_the_figures_are_the_same_again():
    refrain("--json", "once.json")
    refrain("--json", "again.json")
    with open("once.json") as once, open("again.json") as again:
        assert json.load(once) == json.load(again)


def test_the_figures_have_their_names(tmp_path, monkeypatch):
    anything = tuple(replace(one, tolerance=10.0) for one in PRINTS)
    monkeypatch.setattr("benchmarks.papers.specactor_grid.PRINTS", anything)
    text = refrain("--json", "once.json", "--out", "out")
    with open("once.json") as once:
        found = json.load(once)
    figures = found["figures"]
    assert {*NAMES, *(f"{name}_grpo" for name in NAMES), "coupled_at_256"} <= set(figures)
    assert "baseline_idle_share" in figures
    assert set(figures) >= ASKED
    assert figures["standing_points"] == 2
    spreads = {row["figure"]: row for row in found["rows"] if "figure" in row}
    assert spreads["rollout_speedup"]["median"] == figures["rollout_speedup"]
    assert all(row["least"] <= row["median"] <= row["most"] for row in spreads.values())
    assert found["simulation"] is True
    assert {row.get("trace") for row in found["rows"]} == {None, "specactor", "specactor_grpo"}
    assert (tmp_path / "out" / "drafting.png").stat().st_size > 10_000
    for line in text.splitlines():
        if any(word in line for word in ("plan:", "256 requests", "no schedule", "looked at")):
            assert "SIMULATION" in line
    assert "2.0-2.4" in text


def test_only_requested_steps_are_simulated():
    assert "plan:" not in refrain("--steps", "5")


def test_only_shortfalls_are_reported():
    found = simulate_speculation(
        replace(SMALL.speculation, specs=(DAPO,)), SMALL.layout, 0, lambda _: None
    )

    def with_all(speedup, over_coupled, gain):
        return replace(
            found,
            rows=tuple(
                replace(row, speedup=speedup, over_coupled=over_coupled, gain=row.gain and gain)
                for row in found.rows
            ),
        )

    assert shortfalls(with_all(2.1, 1.8, 1.3)) == []
    short = shortfalls(with_all(1.5, 1.6, 1.1))
    assert [line.split(": ")[1] for line in short] == [
        "decoupled brings 1.10, not 1.3",
        "reconfiguration brings 1.10, not 1.2",
        "best-of-N brings 1.10, not 1.2",
        "1.50 over veRL, not 2.0",
        "1.60 over coupled, not 1.7",
    ]
    first, *others = with_all(2.1, 1.8, 1.3).rows
    beaten = replace(found, rows=(replace(first, speedup=2.2), *others))
    (line,) = shortfalls(beaten)
    assert line == f"beaten (specactor): {PARTS[-1]} by veRL, 2.20"
    assert speculation_figures(beaten)["best_of_n_gain"] == 1.3


@pytest.mark.slow
def test_where_nothing_stands_nothing_follows():
    text = refrain("--json", "found.json")
    assert "nothing follows" in text
    with open("found.json") as file:
        figures = json.load(file)["figures"]
    assert figures["standing_points"] == 0
    assert not ASKED & set(figures)
