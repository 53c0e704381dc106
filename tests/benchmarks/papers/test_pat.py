"""The points at which PAT is measured, and what is simulated there."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers.generate import K, generate
from benchmarks.papers.pat import (
    BEST,
    LLAMA,
    NUM_RESPONSES,
    POINTS,
    STEPS,
    TP_DEGREES,
    HostTime,
    Point,
    lengths,
    machine,
    uniform,
)
from benchmarks.papers.switching import (
    PAT,
    PRINTED_BASE,
    Steps,
    SwitchingVariant,
    compare,
    uniform_switches,
)
from benchmarks.papers.switching_study import CHANGES, forecast_error

A40_16K = next(p for p in POINTS if (p.hardware, p.num_gpus, p.max_k) == ("A40", 8, 16))


@pytest.fixture(scope="module")
def a40():
    return Steps.draw(machine(A40_16K), lengths(A40_16K), 0, STEPS[:2])


@pytest.fixture(scope="module")
def compared(a40):
    return compare(a40)


def test_what_is_printed_of_the_best_static_degree_is_what_tp_2_takes():
    """Nothing was fitted to it: lengths and the data sheet give it."""
    steps = Steps.draw(machine(BEST), lengths(BEST), 0)
    assert steps.static(2).seconds == pytest.approx(BEST.static_s, rel=0.03)
    assert steps.num_tokens == pytest.approx(172.5 * 2570.6, rel=0.1)


def test_a_migration_as_in_figure_12_takes_as_long():
    point = Point(LLAMA, "A40", 8, 16)
    sources = [[12 * K] * num for num in (3, 2, 2, 2)]
    costs = machine(point).costs("move")
    cost = costs.cost(2, 8, sources, [[12 * K] * 9])
    assert cost.state_s == pytest.approx(2.36)
    assert cost.seconds == pytest.approx(5.52)


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


def test_switching_saves_what_the_paper_says_over_its_base_and_little_over_the_best(compared):
    """Printed: 1.27 of an iteration."""
    assert compared.best_static == 4
    assert compared.over_printed.speedup == pytest.approx(1.27, abs=0.06)
    assert 0.0 <= compared.over_best.reduction < 0.05
    assert set(compared.static) == set(TP_DEGREES)
    assert set(compared.pat) == {PRINTED_BASE, compared.best_static}


def test_the_same_seed_gives_the_same_seconds(compared):
    again = Steps.draw(machine(A40_16K), lengths(A40_16K), 0, STEPS[:2]).switched(PRINTED_BASE)
    assert again.seconds == compared.pat[PRINTED_BASE].seconds
    other = Steps.draw(machine(A40_16K), lengths(A40_16K), 1, STEPS[:2]).switched(PRINTED_BASE)
    assert other.seconds != again.seconds


def test_from_the_highest_degree_pat_is_that_one():
    steps = Steps.draw(machine(BEST), lengths(BEST), 0, STEPS[:1])
    found = compare(steps)
    assert found.best_static == found.best_base == 8
    assert found.pat[8] is found.static[8]
    assert found.over_best.reduction == 0.0


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
    # The step in progress ends first.
    assert max(switch.seconds for switch in free.runs[0].switches) < 0.1
    assert free.seconds < compared.pat[PRINTED_BASE].runs[0].step_s


def test_moved_or_recomputed_as_told(a40):
    one = replace(a40, steps=a40.steps[:1])
    assert one.switched(PRINTED_BASE, replace(PAT, kv="move")).moved_share == 1.0
    assert one.switched(PRINTED_BASE, replace(PAT, kv="recompute")).moved_share == 0.0


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
    more = by_name["256 responses"].spec(BEST)
    assert more.prompts_per_step * more.group_size == 2 * NUM_RESPONSES
    assert by_name["half the tokens"].spec(BEST).first_mean_tokens == pytest.approx(
        lengths(BEST).first_mean_tokens / 2
    )
    quick = by_name["switches of 0.3 s"].machine(BEST)
    assert quick.costs().wake_s == 0.3
    assert machine(BEST).costs().wake_s == pytest.approx(3.16)
    slow = by_name["4 ms of overhead a step"].machine(BEST).latency
    assert slow.decode_s(2, 1, 1.0) - machine(BEST).latency.decode_s(2, 1, 1.0) == pytest.approx(
        2e-3
    )


def test_the_host_takes_its_time_for_each_request():
    plain = machine(BEST).latency
    host = machine(BEST, request_s=1e-4).latency
    assert isinstance(host, HostTime)
    assert host.decode_s(2, 32, 1e5) - plain.decode_s(2, 32, 1e5) == pytest.approx(32e-4)
    assert host.verify_s(2, 32, 1e5, 3) - plain.verify_s(2, 32, 1e5, 3) == pytest.approx(32e-4)
    assert host.prefill_s(2, 3, 500.0) == plain.prefill_s(2, 3, 500.0)
