"""The points at which the paper measures PAT, and their simulation."""

import math
from dataclasses import replace

import pytest

from refrain.benchmarks.papers.generate import K, generate
from refrain.benchmarks.papers.pat import (
    BEST,
    CONTROL_S,
    FITTED,
    LLAMA,
    NUM_RESPONSES,
    POINTS,
    STEPS,
    TP_DEGREES,
    Point,
    lengths,
    machine,
)
from refrain.benchmarks.papers.scene import run_scene
from refrain.benchmarks.papers.switching import PRINTED_BASE, Steps, compare
from refrain.engines.latency.hardware import H100

A40_16K = next(p for p in POINTS if (p.hardware, p.num_gpus, p.max_k) == ("A40", 8, 16))
PRESET = {name: getattr(H100, name) for name in FITTED["H100"]}
"""Figures of the data sheet in place of the fitted ones."""


@pytest.fixture(scope="module")
def a40():
    return Steps.draw(machine(A40_16K), lengths(A40_16K), 0, STEPS[:2])


@pytest.fixture(scope="module")
def compared(a40):
    return compare(a40)


@pytest.mark.parametrize("hardware", [None, PRESET])
def test_printed_best_static_degree_matches_tp_2(hardware):
    """This also holds without fitted parameters: lengths and the data sheet suffice."""
    steps = Steps.draw(machine(BEST, hardware), lengths(BEST), 0)
    assert steps.static(2).seconds == pytest.approx(BEST.static_s, rel=0.03)
    assert steps.num_tokens == pytest.approx(172.5 * 2570.6, rel=0.1)


def test_a_migration_as_in_figure_12_takes_as_long():
    point = Point(LLAMA, "A40", 8, 16)
    sources = [[12 * K] * num for num in (3, 2, 2, 2)]
    costs = replace(machine(point).costs(), kv="move", ahead=False)
    moved_s = costs.move_s(2, 8, sources, [[12 * K] * 9])
    assert moved_s == pytest.approx(2.36)
    assert costs.control_s + moved_s == pytest.approx(5.52)


def test_the_share_of_generation_is_that_of_figure_3(a40):
    static_s = a40.static(2).seconds
    assert static_s / (static_s + A40_16K.rest_s(a40.num_tokens)) == pytest.approx(0.817, abs=0.02)


@pytest.mark.parametrize("point", [BEST, A40_16K])
def test_each_step_has_a_response_of_the_maximum(point):
    trace = generate(lengths(point), 0)
    for step in STEPS:
        tokens = trace.step(step).column("response_tokens")
        assert len(tokens) == NUM_RESPONSES
        assert tokens.max() == point.max_tokens


def test_the_epoch_before_has_the_same_prompts(a40):
    for step in a40.steps:
        keys = set(a40.trace.step(step).table["prompt_key"].to_pylist())
        before = a40.trace.before(step)
        assert keys <= set(before.table["prompt_key"].to_pylist())


def test_switching_saves_as_printed_over_its_base(compared):
    """The paper prints a speedup of 1.27 for an iteration."""
    assert compared.best_static == 4
    assert compared.over_printed.speedup == pytest.approx(1.27, abs=0.06)
    assert 0.0 <= compared.over_best.reduction < 0.05
    assert set(compared.static) == set(TP_DEGREES)
    assert set(compared.pat) == {PRINTED_BASE}


def test_pat_begins_in_the_highest_degree_if_best():
    """This uses the data sheet only. The layout is kept from the step before, so it costs nothing.
    A step that begins in TP 2 loses at least the cost of the switch."""
    steps = Steps.draw(machine(BEST, PRESET), lengths(BEST), 0, STEPS[:1])
    found = compare(steps)
    assert found.best_static == 8
    (run,) = found.pat[PRINTED_BASE].runs
    assert run.begun == {0: 8}
    assert run.switches == ()
    assert run.step_s == pytest.approx(found.static[8].seconds, rel=1e-6)
    base = replace(steps.scene(STEPS[0], PRINTED_BASE), opens=False)
    from_base = run_scene(base, base.policies())
    assert from_base.begun == {0: 2}
    assert from_base.step_s > run.step_s + CONTROL_S["H100"]


def test_a_change_of_layout_is_paid_for_once():
    """The first step begins with a change from TP 2. The next step keeps the layout."""
    steps = Steps.draw(machine(BEST, PRESET), lengths(BEST), 0, STEPS[:1])
    scene = steps.scene(STEPS[0], PRINTED_BASE)
    changed = run_scene(scene, scene.policies())
    kept = run_scene(scene.after(changed), scene.policies())
    assert changed.begun == kept.begun == {0: 8}
    assert changed.step_s - kept.step_s == pytest.approx(CONTROL_S["H100"])


def test_switching_generates_the_same_tokens(compared):
    static, switched = (
        sorted(len(r.generated.token_ids) for r in runs.runs[0].rollouts)
        for runs in (compared.static[2], compared.pat[PRINTED_BASE])
    )
    assert switched == static


@pytest.mark.parametrize(
    ("tp_degree", "responses", "printed_s"),
    [(2, 1, 15.37e-3), (8, 1, 9.64e-3), (2, 128, 24.41e-3), (8, 128, 30.87e-3)],
)
def test_tokens_take_what_figure_4_prints(tp_degree, responses, printed_s):
    """Assumed: 2,048 tokens of context."""
    batch = math.ceil(responses * tp_degree / 8)
    decode_s = machine(A40_16K).latency.decode_s(tp_degree, batch, batch * 2048)
    assert decode_s == pytest.approx(printed_s, rel=0.03)
