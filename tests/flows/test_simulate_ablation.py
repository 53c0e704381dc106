"""`refrain simulate --paper rhymerl` at reduced size: each part beside the paper's number."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from click.testing import CliRunner
from rich.console import Console

from refrain.benchmarks.papers.generate import rhymerl
from refrain.benchmarks.papers.present.ablation import ablation_figures, show_ablation
from refrain.benchmarks.papers.rhymerl import BASELINE, PipelineRow, variants
from refrain.benchmarks.papers.settings import SETTINGS, Overlap
from refrain.benchmarks.papers.windows import GatedHistory
from refrain.flows.cli import main
from refrain.schemas.simulate import ClusterLayout, PipelinedStep, SimulatedPipeline

SPEC = rhymerl().model_copy(update={"num_prompts": 32, "prompts_per_step": 8, "group_size": 4})
(SETTING,) = SETTINGS["rhymerl"]
SMALL = replace(
    SETTING,
    spec=SPEC,
    layout=ClusterLayout(num_engines=4),
    steps=(5,),
    overlap=Overlap(
        maxima=(8192, 16384),
        num_groups=2,
        steps=tuple(range(9, 15)),
        more_steps=tuple(range(15, 19)),
        sync_s=0.1,
        train_share=0.09,
    ),
)


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SETTINGS, "rhymerl", (SMALL,))
    monkeypatch.setattr("refrain.flows.simulate.draw_gantt", lambda *given: given[2].touch())


def refrain(*args):
    result = CliRunner().invoke(main, ["simulate", "--paper", "rhymerl", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_figures_have_their_names():
    text = refrain("--json", "once.json")
    with open("once.json") as once:
        found = json.load(once)
    figures = found["figures"]
    for name in ("alternation_speedup", "two_tier_speedup", "histospec_speedup"):
        assert figures[f"{name}_8k"] > 0.0
        assert figures[f"{name}_16k"] > 0.0
    parts = ("alternation", "two_tier", "histospec")
    product = 1.0
    for part in parts:
        product *= figures[f"{part}_speedup_8k"]
    assert figures["total_speedup_8k"] == pytest.approx(product, rel=1e-4)
    assert "total_speedup_16k" in figures
    assert "baseline_idle_share" in figures
    assert 0.0 <= figures["migrated_share"] < 1.0
    assert "SIMULATION rhymerl, overlapping steps 11 to 12: 8K" in text
    assert {row.get("over") for row in found["rows"]} >= {None, BASELINE}


def test_only_requested_steps_are_simulated():
    assert "overlapping" not in refrain("--steps", "5")


VARIANTS = variants(SMALL.layout, SMALL.latency, 16, GatedHistory(SMALL.latency, 2, ()))
RATES = [100, 91, 115, 120, 140, 150, 220, 110, 130, 300, 600, 700, 650, 300, 142, 158, 240]
"""Samples per second of `VARIANTS`: the baseline, the other systems, and RhymeRL's parts."""


def rows(moved=3):
    """Return the rows of one maximum from these rates."""
    found, by_name = [], {}
    for variant, rate in zip(VARIANTS, RATES, strict=True):
        step = PipelinedStep(
            step=3,
            called_s=0.0,
            finished_s=1.0,
            num_planned=100,
            num_rollouts=rate,
            num_tokens=rate,
            num_migrated=moved if variant.part else 0,
            num_deferred=1 if variant.part else 0,
            staleness=1,
            deferred_staleness=2,
            mean_staleness=1.0,
        )
        name = variant.name
        result = SimulatedPipeline(
            configuration=name, steps=(step,), measured=(3,), seconds=1.0, idle_shares=(0.0,)
        )
        by_name[name] = rate
        over = by_name[variant.over or name]
        found.append(PipelineRow(variant, 16384, result, rate / over, rate / 100))
    return found


def test_every_system_stands_beside_what_is_printed():
    console = Console(width=200, file=StringIO())
    figures = show_ablation(rows(), console).figures
    lines = {line[:28].strip(): line[28:].split() for line in console.file.getvalue().splitlines()}
    assert lines["alternation"][2:6] == ["1.42", "1.43", "1.42", "1.69"]
    assert lines["veRL, one step off"][2:6] == ["1.00", "1.00", "2.40", "2.3"]
    assert lines["AReaL, 8 stale"][2:6] == ["1.40", "1.40", "1.71", "1.4"]
    assert figures == ablation_figures(rows())
    assert figures["alternation_speedup_16k"] == pytest.approx(1.42)
    assert figures["total_speedup_16k"] == pytest.approx(2.4)
    assert figures["migrated_share"] == pytest.approx(0.04)
    assert figures["areal_8_speedup_16k"] == pytest.approx(1.4)
    assert figures["queue_total_speedup_16k"] == pytest.approx(6.0)
    assert figures["queue_hindsight_speedup_16k"] == pytest.approx(6.5)
    assert figures["areal_8_rhymerl_over_16k"] == pytest.approx(240 / 140)
    assert figures["on_policy_mean_staleness_16k"] == 1.0
