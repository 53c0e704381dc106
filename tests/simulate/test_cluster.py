"""Simulated steps: the arithmetic is right, the same seed gives the same bytes, and bad input is
refused."""

import numpy as np
import pyarrow as pa
import pytest

from refrain.benchmarks.papers.generate import generate, rhymerl
from refrain.engines.histopipe.placement import deal_groups
from refrain.engines.latency.fitted import FittedLatency
from refrain.engines.reports.simulation import batch_over_time, draw_gantt
from refrain.engines.rollout.moves import Migrate
from refrain.engines.simulate.cluster import (
    PolicySet,
    check_latency,
    compare_step,
    even,
    simulate_step,
    summarise,
)
from refrain.engines.simulate.trace import Trace
from refrain.schemas.latency import PointKind
from refrain.schemas.rollout import DraftSetting
from refrain.schemas.scheduling import HistoPipeConfig
from refrain.schemas.simulate import ClusterLayout
from tests.latency.machines import AffineMachine, measure
from tests.simulate.comparing import compare
from tests.simulate.latencies import LinearLatency
from tests.simulate.test_trace import changed

LATENCY = LinearLatency(0.01, 1e-4, 1e-7)
SMALL = rhymerl().model_copy(update={"num_prompts": 32, "prompts_per_step": 16, "group_size": 4})


def test_shares_follow_from_the_finish_times():
    trace = Trace(changed(), "t").step(2)  # 9 and 2 tokens of prompt "b"
    result = simulate_step(
        trace, ClusterLayout(num_engines=2), LinearLatency(1.0, prefill_step_s=1.0)
    )
    step = result.step
    assert step.step_s == 9.0
    assert step.idle_shares == (0.0, 1.0)
    assert step.one_left_shares == pytest.approx((7 / 9, 0.0))
    assert step.last_alone_share == pytest.approx(7 / 9)
    assert step.tokens_per_s == pytest.approx(11 / 9)
    assert step.idle_share + step.one_left_share == pytest.approx((7 / 9 + 1) / 2)


class Balance:
    """Moves one request from the fullest engine to an idle one."""

    def decide(self, view):
        idle = [e for e in view.engines if not e.progress]
        fullest = max(view.engines, key=lambda e: len(e.progress))
        if not idle or len(fullest.progress) < 2:
            return []
        return [Migrate(min(fullest.progress, key=str), idle[0].engine)]


SETS = (
    PolicySet("baseline"),
    PolicySet("ranked", deal_groups),
    PolicySet("balanced", even, (Balance(),), report_s=5.0),
)


def test_policy_sets_side_by_side():
    trace = generate(SMALL, 5, range(1, 5))
    rows = summarise(compare(trace, ClusterLayout(num_engines=8), LATENCY, SETS))
    assert [row.policy_set for row in rows] == ["baseline", "ranked", "balanced"]
    assert rows[0].speedup == 1.0
    assert rows[0].num_migrated == 0
    assert rows[2].num_migrated > 0
    assert rows[2].idle_share < rows[0].idle_share
    assert rows[2].speedup > 1.0


def test_ranked_placement_uses_the_epoch_before():
    trace = generate(SMALL, 5, range(1, 5))
    seen = []

    def spy(keys, medians, num_engines):
        seen.append((set(keys) <= set(medians), num_engines))
        return deal_groups(keys, medians, num_engines)

    compare(trace, ClusterLayout(num_engines=4), LATENCY, [PolicySet("spy", spy)])
    assert seen == [(False, 4), (False, 4), (True, 4), (True, 4)]


def own(**settings):
    return PolicySet("own", report_s=1.0, histopipe=HistoPipeConfig(**settings))


def test_placement_is_a_pipelined_runs():
    """The order of known groups alternates between the ends of the cluster. In the first epoch,
    nothing is known, and groups are dealt."""
    trace, layout = generate(SMALL, 5, range(1, 9)), ClusterLayout(num_engines=8)
    for step in trace.steps:
        found, dealt = compare_step(trace, step, layout, LATENCY, [own(), SETS[1]])
        medians = trace.history(step)
        lengths = [medians.get(rollout.request.id.prompt_key, 0.0) for rollout in found.rollouts]
        engines = [rollout.engine for rollout in found.rollouts]
        if any(lengths):
            assert np.corrcoef(lengths, engines)[0, 1] * (1 if step % 2 else -1) > 0.25
        else:
            assert engines == [rollout.engine for rollout in dealt.rollouts]


def test_outliers_move_as_in_a_pipelined_run():
    trace, layout = generate(SMALL, 5, range(1, 6)), ClusterLayout(num_engines=8)
    medians = trace.history(5)
    rows = trace.table.to_pylist()
    shortest = min(medians, key=medians.__getitem__)
    grown = next(row for row in rows if (row["step"], row["prompt_key"]) == (5, shortest))
    grown["response_tokens"] = 30_000
    longer = Trace(pa.Table.from_pylist(rows, schema=trace.table.schema), "t")
    sets = [own(), own(last_share=0.0), SETS[1]]
    found = compare_step(longer, 5, layout, LATENCY, sets)
    assert [simulation.step.num_migrated for simulation in found] == [1, 0, 0]


def test_a_latency_model_without_figures_is_refused():
    trace = Trace(changed(), "t")
    nothing = LinearLatency(0.0)
    with pytest.raises(ValueError, match=r"gives 0.0 s for decoding one request at TP 1: profile"):
        simulate_step(trace.step(1), ClusterLayout(num_engines=1), nothing)
    with pytest.raises(ValueError, match="t has 2 steps: simulate one at a time"):
        simulate_step(trace, ClusterLayout(num_engines=1), LATENCY)


def test_picture_shows_busy_engines(tmp_path):
    result = simulate_step(generate(SMALL, 5, [1]), ClusterLayout(num_engines=4), LATENCY)
    step_s = result.step.step_s
    batches = batch_over_time(result.timelines, step_s)
    areas = [sum(i.batch * (i.end_s - i.start_s) for i in t) for t in result.timelines]
    assert batches.sum(axis=1) * step_s / batches.shape[1] == pytest.approx(areas)
    assert np.argmin(areas) == np.argmin(batches.sum(axis=1))
    for name in ("a.png", "b.png"):
        draw_gantt(result.timelines, step_s, tmp_path / name, "four engines")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


NGRAM = DraftSetting("ngram", 2)
DRAFTING = PolicySet("drafting", drafting=NGRAM)
STEPWISE = LinearLatency(1.0, prefill_step_s=1.0)


def test_every_engine_drafts_with_the_acceptance_of_the_trace():
    """Engine 0 makes 7 tokens at p = 1/2 and engine 1 makes 9 at p = 1. A drafting step takes
    1.022 s."""
    columns = {"prompt_key": ["a", "b"] * 2, "step": [1, 1, 2, 2], "acceptance": [0.5, 1.0] * 2}
    trace = Trace(changed(**columns, response_tokens=[8, 10, 8, 10]), "t").step(1)
    step = simulate_step(trace, ClusterLayout(num_engines=2), STEPWISE, DRAFTING).step
    assert step.step_s == pytest.approx(1.0 + 4 * 1.022)
    assert step.idle_shares == pytest.approx((0.0, 1.022 / step.step_s))
    assert step.num_tokens == 18


@pytest.mark.parametrize(("default", "num_steps"), [(None, 6), (0.0, 6), (1.0, 3)])
def test_a_default_is_for_the_rows_without_acceptance(default, num_steps):
    trace = Trace(changed(), "t").step(1)  # 5 tokens at 1/2, and 7 without an acceptance
    step = simulate_step(
        trace, ClusterLayout(num_engines=1), STEPWISE, DRAFTING, acceptance=default
    ).step
    assert step.step_s == pytest.approx(1.0 + num_steps * 1.022)


def test_drafting_needs_an_acceptance():
    trace = Trace(changed(acceptance=[None] * 4), "t")
    layout = ClusterLayout(num_engines=1)
    with pytest.raises(ValueError, match=r"t has no acceptance at step 1: give --acceptance"):
        simulate_step(trace.step(1), layout, LATENCY, DRAFTING)
    with pytest.raises(ValueError, match=r"a share of draft tokens, from 0 to 1, not 1\.5"):
        simulate_step(trace.step(1), layout, LATENCY, DRAFTING, acceptance=1.5)
    assert simulate_step(trace.step(1), layout, LATENCY).step.num_rollouts == 2
    rows = compare(trace, layout, LATENCY, [PolicySet(), DRAFTING], acceptance=0.9)
    plain, drafting = summarise(rows)
    assert drafting.speedup > 1.0 == plain.speedup


def test_same_seed_same_bytes_when_drafting_and_moving():
    shares = np.random.default_rng(0).random(SMALL.prompts_per_step * SMALL.group_size)
    table = generate(SMALL, 5, [1]).table
    place = table.column_names.index("acceptance")
    trace = Trace(table.set_column(place, "acceptance", [shares]), "t")
    policy_set = PolicySet("both", even, (Balance(),), report_s=5.0, drafting=NGRAM)
    layout = ClusterLayout(num_engines=8, max_context_tokens=40_000)
    once, again = (simulate_step(trace, layout, LATENCY, policy_set) for _ in range(2))
    assert once == again
    assert once.step.num_migrated > 0
    assert once.step.step_s < simulate_step(trace, layout, LATENCY).step.step_s


def profiled(*kinds):
    profile = measure(AffineMachine())
    points = tuple(point for point in profile.points if point.kind in kinds)
    return FittedLatency(profile.model_copy(update={"points": points}))


@pytest.mark.parametrize(
    ("drafter", "window", "kinds", "message"),
    [
        ("oracle", 2, PointKind, "has no drafter 'oracle'; known: lookup, small"),
        ("lookup", 0, PointKind, "a draft window is at least 1, not 0"),
        ("lookup", 2, ("decode", "prefill", "draft"), "has no verify points at tp_degree 1"),
    ],
)
def test_drafting_that_was_not_profiled_is_refused(drafter, window, kinds, message):
    policy_set = PolicySet("p", drafting=DraftSetting(drafter, window))
    with pytest.raises(ValueError, match=message):
        simulate_step(
            Trace(changed(), "t").step(1),
            ClusterLayout(num_engines=1),
            profiled(*kinds),
            policy_set,
        )


def test_drafting_needs_times():
    class Instant(LinearLatency):
        def verify_s(self, tp_degree, batch, context_tokens, window):
            return 0.0 * tp_degree * batch * context_tokens * window

    class Backwards(LinearLatency):
        def draft_s(self, drafter, batch, window):
            return -0.5 * batch * window if drafter else 0.0

    with pytest.raises(ValueError, match=r"gives 0\.0 s for verifying 2 draft tokens of one req"):
        simulate_step(
            Trace(changed(), "t").step(1), ClusterLayout(num_engines=1), Instant(), DRAFTING
        )
    with pytest.raises(ValueError, match=r"gives -1\.0 s for drafting 2 tokens by 'ngram' for one"):
        check_latency(Backwards(), 1, NGRAM)
    check_latency(LinearLatency(), 1, DraftSetting("", 2))
