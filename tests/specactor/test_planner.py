"""Algorithm 1 finds the best plan: no plan in an enumeration is better."""

import itertools
import math
from functools import partial
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines.latency.drafting_pace import pace
from engines.latency.forecast import step_s
from engines.specactor.planner import Cluster, ExecutionPlan, plan_decoupled, split_gpus
from schemas.rollout import DraftSetting
from tests.specactor.expectations import paper_tokens_per_s, streamed_tokens_per_s
from tests.specactor.latencies import AffineLatency, affine_latencies

MAX_WINDOW = 10
SETTLED = 0.03
"""Relative error of the formulas. Windows that are closer than this may replace each other."""
MACHINE = AffineLatency()

clusters = st.builds(
    Cluster,
    st.integers(1, 5000),
    st.integers(5, 64),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, unique=True).map(tuple),
    st.just(1000.0),
)


def tgs_of(window: int, p: float, token_s: float, verify_s) -> float:
    drafted = DraftSetting("small", window, coupled=False), p
    return pace(drafted, token_s, verify_s).tokens_per_s


def every_plan(cluster, latency, p) -> list[ExecutionPlan]:
    """Return all plans of the search space, computed directly from the formulas."""
    plans = []
    num, gpus = cluster.num_requests, cluster.num_gpus
    for g_v, g_d in product(cluster.verifier_gpus, range(1, 5)):
        if g_d > g_v or g_d + g_v > gpus:
            continue
        b = math.ceil((g_d + g_v) * num / gpus)
        for w in range(1, MAX_WINDOW + 1):
            v = partial(step_s, latency, g_v, b, b * 1000.0)
            d = latency.draft_s("small", math.ceil(b / g_d), 1)
            plans.append(ExecutionPlan(g_d, g_v, w, num * tgs_of(w, p, d, v)))
    return plans


def line_5(latency, batch) -> int:
    """Return the paper's w_max for one drafter and one verifier, with coefficients from two
    batches. V' and beta depend on the window that they bound: take the least window that reaches
    its bound."""
    draft_slope, alpha = line(batch, lambda b: latency.draft_s("small", b, 1))

    def bound(window):
        slope, beta = line(batch, lambda b: latency.verify_s(1, b, 0, window))
        return max(math.ceil(slope / draft_slope), math.ceil(beta / alpha))

    return next(window for window in itertools.count(1) if window >= bound(window))


def line(batch, seconds_at) -> tuple[float, float]:
    """Return slope and intercept through this batch and one twice as large."""
    slope = (seconds_at(2 * batch) - seconds_at(batch)) / batch
    return slope, seconds_at(batch) - batch * slope


@settings(deadline=None, max_examples=25)
@example(Cluster(403, 5, (1,), 1000.0), AffineLatency(1e-3, 38e-6, 12e-6, {"small": (4e-3, 0)}), 1)
@given(clusters, affine_latencies, st.floats(0, 1))
def test_no_plan_is_better(cluster, latency, p):
    plan = plan_decoupled(cluster, latency, "small", p, max_window=MAX_WINDOW)
    plans = every_plan(cluster, latency, p)
    assert not plan.coupled
    assert plan.tokens_per_s == pytest.approx(max(p.tokens_per_s for p in plans), rel=SETTLED)
    assert any(
        (plan.drafter_gpus, plan.verifier_gpus, plan.window)
        == (other.drafter_gpus, other.verifier_gpus, other.window)
        and plan.tokens_per_s == pytest.approx(other.tokens_per_s)
        for other in plans
    )


def best_tgs(expectation, latency, batch, p, max_window) -> float:
    d = latency.draft_s("small", batch, 1)
    return max(
        expectation(w, p, d, latency.verify_s(1, batch, 0, w)) for w in range(1, max_window + 1)
    )


@settings(deadline=None, max_examples=50)
@given(
    st.floats(1, 20),
    st.floats(0.5, 10),
    st.floats(0, 5),
    st.floats(1, 20),
    st.floats(0.5, 10),
    st.integers(1, 500),
    st.floats(0, 1),
)
def test_line_5_loses_nothing_by_the_paper_s_own_expectation(
    base, each, per_draft, alpha, slope, batch, p
):
    drafter = {"small": (alpha * 1e-3, (slope + per_draft) * 1e-5)}
    latency = AffineLatency(base * 1e-3, each * 1e-5, per_draft * 1e-5, drafter)
    bound = line_5(latency, batch)
    within, beyond = (
        best_tgs(paper_tokens_per_s, latency, batch, p, most) for most in (bound, bound + 10)
    )
    assert within == pytest.approx(beyond)


def test_line_5_can_lose_by_the_exact_one():
    """At V / D = 1.8, the third token is often there, but not always."""
    latency = AffineLatency(7.4e-3, 2e-5, 0.0, {"small": (3.87e-3, 1.17e-5)})
    bound = line_5(latency, 292)
    within, beyond = (
        best_tgs(streamed_tokens_per_s, latency, 292, 0.93, most) for most in (bound, bound + 1)
    )
    assert bound == 2
    assert beyond > 1.05 * within


def test_drafts_that_cost_nothing_can_be_planned_for():
    free = AffineLatency(drafters={"small": (0.0, 0.0)})
    plan = plan_decoupled(Cluster(64, 8, (4,), 1000.0), free, "small", 0.8)
    assert plan.drafter_gpus == 1, "free drafts need only one drafter"


@pytest.mark.parametrize("verifier_gpus", [(), (0,), (16,)])
def test_a_verifier_that_does_not_fit_is_refused(verifier_gpus):
    with pytest.raises(ValueError, match="8 GPUs hold no verifier"):
        Cluster(64, 8, verifier_gpus, 1000.0)


def test_nothing_to_plan_for_is_refused():
    with pytest.raises(ValueError, match="nothing to plan"):
        Cluster(0, 8, (4,), 1000.0)


def test_single_gpu_has_no_drafter():
    with pytest.raises(ValueError, match="no room for a drafter"):
        plan_decoupled(Cluster(8, 1, (1,), 1000.0), MACHINE, "small", 0.8)


def every_split(cluster, latency, p, max_batch, max_drafted) -> list[tuple[float, int, int, int]]:
    """Return (tokens per second, engines, drafters, window). Each engine uses one drafter."""
    (tp,), found = cluster.verifier_gpus, []
    for drafters, w in product(range(1, cluster.num_gpus), range(1, MAX_WINDOW + 1)):
        engines = (cluster.num_gpus - drafters) // tp
        if engines < drafters:
            continue
        b = min(max_batch, math.ceil(cluster.num_requests / engines))
        drafted = b * math.ceil(engines / drafters)
        steps = math.ceil(drafted / max_drafted)
        d = steps * latency.draft_s("small", math.ceil(drafted / steps), 1)
        v = partial(step_s, latency, tp, b, b * 1000.0)
        at_once = min(cluster.num_requests, engines * b)
        found.append((at_once * tgs_of(w, p, d, v), engines, drafters, w))
    return found


@settings(deadline=None, max_examples=25)
@example(
    Cluster(4, 5, (1,), 1000.0),
    AffineLatency(0.001, 7.75e-05, 0.000165, {"small": (0.001, 0.0)}),
    1.0,
    8,
    8,
)
@given(
    st.builds(
        Cluster,
        st.integers(1, 5000),
        st.integers(5, 20),
        st.sampled_from([(1,), (2,), (4,)]),
        st.just(1000.0),
    ),
    affine_latencies,
    st.floats(0, 1),
    st.integers(8, 300),
    st.integers(8, 300),
)
def test_no_whole_split_is_better(cluster, latency, p, max_batch, max_drafted):
    caps = {"max_batch": max_batch, "max_drafted": max_drafted}
    split = split_gpus(cluster, latency, "small", p, **caps, max_window=MAX_WINDOW)
    every = every_split(cluster, latency, p, **caps)
    assert split.tokens_per_s == pytest.approx(max(every)[0])
    own = [s for s, *at in every if at == [split.num_engines, split.num_drafters, split.window]]
    assert own == [pytest.approx(split.tokens_per_s)]
    (tp,) = cluster.verifier_gpus
    assert split.num_engines * tp + split.num_drafters <= cluster.num_gpus
    engines = cluster.num_gpus // tp
    b = min(max_batch, math.ceil(cluster.num_requests / engines))
    plain = min(cluster.num_requests, engines * b) / latency.decode_s(tp, b, 0)
    assert split.plain_tokens_per_s == pytest.approx(plain)


def test_slow_drafters_are_given_more_gpus():
    cluster, caps = Cluster(2000, 16, (1,), 1000.0), {"max_batch": 256, "max_drafted": 256}

    def drafters(slope_s: float) -> int:
        latency = AffineLatency(drafters={"small": (0.1e-3, slope_s)})
        return split_gpus(cluster, latency, "small", 0.8, **caps).num_drafters

    assert 1 <= drafters(1e-6) < drafters(20e-6) <= 8


def test_gpus_that_hold_no_drafter_are_not_split():
    with pytest.raises(
        ValueError, match="4 GPUs have no room for a drafter beside a verifier of 4"
    ):
        split_gpus(Cluster(8, 4, (4,), 1e3), MACHINE, "small", 0.8, max_batch=8, max_drafted=8)
