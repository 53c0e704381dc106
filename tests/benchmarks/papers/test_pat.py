"""The points at which the paper measures PAT, and their simulation."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers.generate import K, generate
from benchmarks.papers.pat import (
    BEST,
    FITTED,
    LLAMA,
    NUM_RESPONSES,
    POINTS,
    STEPS,
    TP_DEGREES,
    Point,
    lengths,
    machine,
    uniform,
)
from benchmarks.papers.pat_printed import most_over_static, residuals
from benchmarks.papers.scene import run_scene
from benchmarks.papers.switching import (
    PAT,
    PRINTED_BASE,
    Steps,
    SwitchingVariant,
    compare,
    uniform_switches,
)
from benchmarks.papers.switching_study import CHANGES, MAP, PRESET, forecast_error

A40_16K = next(p for p in POINTS if (p.hardware, p.num_gpus, p.max_k) == ("A40", 8, 16))


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
    costs = replace(machine(point).costs("move"), ahead=False)
    moved_s = costs.move_s(2, 8, sources, [[12 * K] * 9])
    assert moved_s == pytest.approx(2.36)
    assert costs.control_s + moved_s == pytest.approx(5.52)


def test_the_share_of_generation_is_that_of_figure_3(a40):
    static_s = a40.static(2).seconds
    assert static_s / (static_s + A40_16K.rest_s(a40.num_tokens)) == pytest.approx(0.817, abs=0.02)


def test_other_gpus_and_models_take_their_part_of_the_rest():
    one = Point(LLAMA, "A40", 8, 16).rest_s(1000)
    assert Point(LLAMA, "A40", 16, 16).rest_s(1000) == one / 2
    assert BEST.rest_s(172.5 * 2570.6) == pytest.approx(172.5 - 134.3)


@pytest.mark.parametrize("point", [BEST, A40_16K])
def test_each_step_has_a_response_of_the_maximum(point):
    trace = generate(lengths(point), 0)
    for step in STEPS:
        tokens = trace.step(step).column("response_tokens")
        assert len(tokens) == NUM_RESPONSES
        assert tokens.max() == point.max_tokens


def test_lengths_have_the_spread_of_figure_3():
    spec = lengths(A40_16K)
    trace = generate(spec.model_copy(update={"max_response_tokens": 32 * K}), 0)
    tokens = trace.column("response_tokens")
    assert np.mean(tokens > 8 * K) == pytest.approx(0.1085, abs=0.035)
    assert np.mean(tokens > 16 * K) == pytest.approx(0.0218, abs=0.015)


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


def test_the_same_seed_gives_the_same_seconds(compared):
    again = Steps.draw(machine(A40_16K), lengths(A40_16K), 0, STEPS[:2]).switched(PRINTED_BASE)
    assert again.seconds == compared.pat[PRINTED_BASE].seconds
    other = Steps.draw(machine(A40_16K), lengths(A40_16K), 1, STEPS[:2]).switched(PRINTED_BASE)
    assert other.seconds != again.seconds


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
    from_base = steps.switched(PRINTED_BASE, SwitchingVariant(opening="base"))
    assert from_base.runs[0].begun == {0: 2}
    assert from_base.seconds > run.step_s + machine(BEST).control_s


def test_a_change_of_layout_is_paid_for_once():
    """The first step begins with a change from TP 2. The next step keeps the layout."""
    steps = Steps.draw(machine(BEST, PRESET), lengths(BEST), 0, STEPS[:1])
    scene = steps.scene(STEPS[0], PRINTED_BASE)
    changed = run_scene(scene, scene.policies())
    kept = run_scene(scene.after(changed), scene.policies())
    assert changed.begun == kept.begun == {0: 8}
    assert changed.step_s - kept.step_s == pytest.approx(machine(BEST).control_s)


@pytest.mark.parametrize("lengths", ["maximum", "exact"])
def test_every_variant_generates_the_same_tokens(a40, compared, lengths):
    static = sorted(len(r.generated.token_ids) for r in compared.static[2].runs[0].rollouts)
    one = replace(a40, steps=a40.steps[:1])
    runs = one.switched(PRINTED_BASE, SwitchingVariant(lengths=lengths, waits=False)).runs
    assert sorted(len(r.generated.token_ids) for r in runs[0].rollouts) == static


def test_free_switches_take_no_time(a40, compared):
    one = replace(a40, steps=a40.steps[:1])
    free = one.switched(PRINTED_BASE, replace(PAT, free=True))
    assert free.runs[0].switches
    # A free switch still waits for the engine step in progress.
    assert max(switch.seconds for switch in free.runs[0].switches) < 0.1
    assert free.seconds < compared.pat[PRINTED_BASE].runs[0].step_s


def test_moved_or_recomputed_as_told(a40):
    one = replace(a40, steps=a40.steps[:1])
    assert one.switched(PRINTED_BASE, replace(PAT, kv="move")).moved_share == 1.0
    assert one.switched(PRINTED_BASE, replace(PAT, kv="recompute")).moved_share == 0.0


def test_all_printed_seconds_are_fitted_together():
    """Seven parameters fit eight times. The two times of PAT pull in opposite directions."""
    found = residuals()
    assert len(found) == 8
    assert max(map(abs, found.values())) < 0.07
    assert max(abs(r) for name, r in found.items() if "PAT" not in name) < 0.03


@pytest.mark.parametrize(
    ("field", "hardware"),
    [("layer_s", "both"), ("memory_share", "both"), ("hop_s", "A40"), ("collective_s", "H100")],
)
@pytest.mark.parametrize("factor", [0.85, 1.15])
def test_no_parameter_could_as_well_be_another(field, hardware, factor):
    """Each parameter has its least-squares value, to two digits."""

    def loss(fitted):
        return sum(r**2 for r in residuals(fitted).values())

    other = {
        name: {**of, field: factor * of[field]} if hardware in (name, "both") else of
        for name, of in FITTED.items()
    }
    assert loss(other) > loss(FITTED)


@pytest.mark.parametrize("max_k", [6, 8, 12, 16])
def test_printed_figures_bound_the_gain_over_static(max_k):
    """For 8 A40, by figures 3b and 4 alone, switches at no cost gain only 2 to 8 %."""
    assert 1.02 < most_over_static(max_k) < 1.08


def test_uniform_lengths_never_switch():
    steps = Steps.draw(machine(A40_16K), uniform(A40_16K), 0, STEPS[:1])
    tokens = steps.trace.step(STEPS[0]).column("response_tokens")
    assert tokens.min() > 0.99 * tokens.max()
    assert uniform_switches(steps) == 0


def test_forecasts_are_as_good_as_what_is_known_of_lengths(a40):
    exact, history, maximum = (
        forecast_error(a40.scene(a40.steps[0], 2, SwitchingVariant(lengths=kind), higher=()))
        for kind in ("exact", "history", "maximum")
    )
    assert exact < 0.03
    assert exact < history < maximum


def test_changes_change_what_they_say():
    by_name = {change.name: change for change in CHANGES}
    more = next(change for change in MAP if "512 responses" in change.name).spec(BEST)
    assert more.prompts_per_step * more.group_size == 4 * NUM_RESPONSES
    assert by_name["half the tokens"].spec(BEST).first_mean_tokens == pytest.approx(
        lengths(BEST).first_mean_tokens / 2
    )
    quick = by_name["switches of 0.3 s"].machine(BEST)
    assert quick.costs().wake_s == 0.3
    assert machine(A40_16K).costs().wake_s == pytest.approx(3.16)
    # Only the part of a switch that uses NVLink is faster.
    assert machine(BEST).costs().wake_s == pytest.approx(3.16 - 1.03 + 1.03 * 31.5 / 450)
    slow = by_name["4 ms of overhead a step"].machine(BEST).latency
    assert slow.decode_s(2, 1, 1.0) - machine(BEST).latency.decode_s(2, 1, 1.0) == pytest.approx(
        4e-3 - FITTED["H100"]["step_overhead_s"]
    )


def test_the_map_is_of_all_there_is_to_compare():
    fields = [(change.responses, *change.hardware.values()) for change in MAP]
    assert len(set(fields)) == len(MAP) == 12


def test_the_host_takes_its_time_for_each_request():
    plain = machine(BEST, {"request_s": 0.0}).latency
    host = machine(BEST, {"request_s": 1e-4}).latency
    assert host.decode_s(2, 32, 1e5) - plain.decode_s(2, 32, 1e5) == pytest.approx(32e-4)
    assert host.verify_s(2, 32, 1e5, 3) - plain.verify_s(2, 32, 1e5, 3) == pytest.approx(32e-4)
    assert host.prefill_s(2, 3, 500.0) == plain.prefill_s(2, 3, 500.0)
