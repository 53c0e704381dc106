"""Algorithm 1 finds the best split of the GPUs: none in an enumeration is better."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refrain.engines.latency.drafting_pace import pace
from refrain.engines.latency.forecast import step_s
from refrain.engines.specactor.planner import Cluster, split_gpus
from refrain.schemas.rollout import DraftSetting
from tests.specactor.latencies import AffineLatency, affine_latencies

MAX_WINDOW = 10
MACHINE = AffineLatency()


CLUSTER = Cluster(64, 8, 4, 1000.0, max_batch=64, max_drafted=64)


def test_drafts_that_cost_nothing_can_be_planned_for():
    free = AffineLatency(drafters={"small": (0.0, 0.0)})
    plan = split_gpus(CLUSTER, free, "small", 0.8)
    assert (plan.num_engines, plan.num_drafters, plan.engines_per_drafter) == (1, 1, 1)
    assert plan.tokens_per_s > 0.5 * plan.plain_tokens_per_s


@pytest.mark.parametrize("tp_degree", [0, 9])
def test_cluster_that_holds_no_engine_is_refused(tp_degree):
    with pytest.raises(ValueError, match=f"8 GPUs hold no engine of {tp_degree} GPUs"):
        replace(CLUSTER, tp_degree=tp_degree)


def test_no_requests_are_refused():
    with pytest.raises(ValueError, match="nothing to plan"):
        replace(CLUSTER, num_requests=0)


def every_split(cluster, latency, p) -> list[tuple[float, int, int, int]]:
    """Return (tokens per second, engines, drafters, window). Each engine uses one drafter."""
    tp, found = cluster.tp_degree, []
    for drafters, w in product(range(1, cluster.num_gpus), range(1, MAX_WINDOW + 1)):
        engines = (cluster.num_gpus - drafters) // tp
        if engines < drafters:
            continue
        b = min(cluster.max_batch, math.ceil(cluster.num_requests / engines))
        drafted = b * math.ceil(engines / drafters)
        steps = math.ceil(drafted / cluster.max_drafted)
        d = steps * latency.draft_s("small", math.ceil(drafted / steps), 1)
        v = partial(step_s, latency, tp, b, b * 1000.0)
        at_once = min(cluster.num_requests, engines * b)
        setting = DraftSetting("small", w, coupled=False)
        speed = at_once * pace((setting, p), b, d, v).tokens_per_s
        found.append((speed, engines, drafters, w))
    return found


@settings(deadline=None, max_examples=25)
@example(
    Cluster(4, 5, 1, 1000.0, 8, 8),
    AffineLatency(0.001, 7.75e-05, 0.000165, {"small": (0.001, 0.0)}),
    1.0,
)
@given(
    st.builds(
        Cluster,
        st.integers(1, 5000),
        st.integers(5, 20),
        st.sampled_from([1, 2, 4]),
        st.just(1000.0),
        st.integers(8, 300),
        st.integers(8, 300),
    ),
    affine_latencies,
    st.floats(0, 1),
)
def test_no_whole_split_is_better(cluster, latency, p):
    split = split_gpus(cluster, latency, "small", p, max_window=MAX_WINDOW)
    every = every_split(cluster, latency, p)
    assert split.tokens_per_s == pytest.approx(max(every)[0], rel=0.02)
    own = [s for s, *at in every if at == [split.num_engines, split.num_drafters, split.window]]
    assert own == [pytest.approx(split.tokens_per_s)]
    tp = cluster.tp_degree
    assert split.num_engines * tp + split.num_drafters <= cluster.num_gpus
    engines = cluster.num_gpus // tp
    b = min(cluster.max_batch, math.ceil(cluster.num_requests / engines))
    plain = min(cluster.num_requests, engines * b) / latency.decode_s(tp, b, 0)
    assert split.plain_tokens_per_s == pytest.approx(plain)


def test_slow_drafters_are_given_more_gpus():
    cluster = Cluster(2000, 16, 1, 1000.0, max_batch=256, max_drafted=256)

    def drafters(slope_s: float) -> int:
        latency = AffineLatency(drafters={"small": (0.1e-3, slope_s)})
        return split_gpus(cluster, latency, "small", 0.8).num_drafters

    assert 1 <= drafters(1e-6) < drafters(20e-6) <= 8


@pytest.mark.parametrize(("num_gpus", "tp_degree"), [(4, 4), (1, 1)])
def test_gpus_that_hold_no_drafter_are_not_split(num_gpus, tp_degree):
    cluster = replace(CLUSTER, num_gpus=num_gpus, tp_degree=tp_degree)
    message = f"{num_gpus} GPUs have no room for a drafter beside an engine of {tp_degree}"
    with pytest.raises(ValueError, match=message):
        split_gpus(cluster, MACHINE, "small", 0.8)
