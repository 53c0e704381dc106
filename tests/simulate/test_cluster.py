"""Simulated steps: the arithmetic, the determinism, the refusals."""

import numpy as np
import pytest

from engines.histopipe.dealing import deal_groups
from engines.rollout.moves import Migrate
from engines.simulate.cluster import PolicySet, compare, even, simulate_step, summarise
from engines.simulate.gantt import batch_over_time, draw_gantt
from engines.simulate.generate import generate, rhymerl
from engines.simulate.trace import Trace
from schemas.simulate import ClusterLayout
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
    assert step.at_most_one_left_share == pytest.approx((7 / 9 + 1) / 2)


class Balance:
    """Moves one request from the fullest engine to an empty one."""

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


def test_same_seed_same_bytes():
    def run():
        results = compare(
            generate(SMALL, 5, range(1, 5)), ClusterLayout(num_engines=8), LATENCY, SETS
        )
        return "".join(row.model_dump_json() for row in [*results, *summarise(results)])

    assert run() == run()


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


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"num_engines": 1, "tp_degree": 16}, "TP 16 does not fit a node of 8 GPUs"),
        ({"num_engines": 5, "tp_degree": 2, "num_gpus": 8}, "5 engines of TP 2 do not fit 8 GPUs"),
        ({"num_engines": 5, "tp_degree": 3, "num_gpus": 16}, "at most 4 do"),
        ({"num_engines": 0}, "greater than 0"),
    ],
)
def test_impossible_layouts(layout, message):
    with pytest.raises(ValueError, match=message):
        ClusterLayout(**layout)


def test_a_latency_model_without_figures_is_refused():
    trace = Trace(changed(), "t")
    nothing = LinearLatency(0.0)
    with pytest.raises(ValueError, match=r"gives 0.0 s for decoding one request at TP 1: profile"):
        simulate_step(trace.step(1), ClusterLayout(num_engines=1), nothing)
    with pytest.raises(ValueError, match="t has 2 steps: simulate one at a time"):
        simulate_step(trace, ClusterLayout(num_engines=1), LATENCY)


def test_a_small_cache_costs_time():
    trace = generate(SMALL, 5, [1])
    longest = int((trace.column("prompt_tokens") + trace.column("response_tokens")).max())
    plain = simulate_step(trace, ClusterLayout(num_engines=2), LATENCY).step
    layout = ClusterLayout(num_engines=2, max_context_tokens=longest)
    tight = simulate_step(trace, layout, LATENCY).step
    assert tight.num_preempted > 0
    assert tight.step_s > plain.step_s
    assert tight.num_tokens == plain.num_tokens


def test_the_picture_shows_who_was_busy(tmp_path):
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
