"""`refrain simulate --paper specactor` at reduced size: each part beside the paper's number."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from refrain.benchmarks.papers.settings import SETTINGS
from refrain.flows.cli import main
from refrain.schemas.simulate import ClusterLayout

(SETTING,) = SETTINGS["specactor"]
SPEC = SETTING.spec.model_copy(
    update={"num_prompts": 32, "prompts_per_step": 8, "group_size": 8, "num_steps": 8}
)
SMALL = replace(
    SETTING,
    spec=SPEC,
    layout=ClusterLayout(num_engines=5, tp_degree=4),
    steps=(4,),
    speculation_step=8,
)
NAMES = {
    *("decoupled_gain", "reconfiguration_gain", "best_of_n_gain", "coupled_at_256"),
    *("speculation_speedup", "even_ends_speculation_speedup", "baseline_idle_share"),
    *("speculation_over_fair_verl", "even_ends_speculation_over_fair_verl"),
}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SETTINGS, "specactor", (SMALL,))


def refrain(*args):
    result = CliRunner().invoke(main, ["simulate", "--paper", "specactor", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_figures_have_their_names():
    text = refrain("--json", "once.json")
    with open("once.json") as once:
        found = json.load(once)
    assert set(found["figures"]) >= NAMES
    assert found["simulation"] is True
    for line in text.splitlines():
        if any(word in line for word in ("plan:", "256 requests")):
            assert "SIMULATION" in line
    assert "2.0-2.4" in text


def test_only_requested_steps_are_simulated():
    assert "plan:" not in refrain("--steps", "5")
