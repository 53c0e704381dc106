"""Pools whose GPUs change their TP degree, by the real coordinator and policy in virtual time."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.pools import Nodes, simulate_pools, switch_times
from benchmarks.papers.switching import Exact
from engines.control.controller import Controller
from engines.control.effects import Effects
from engines.control.outlook import Outlook
from engines.control.reshaping import Reshaping
from engines.control.state import Forecaster
from engines.latency.analytic import AnalyticLatency
from engines.latency.hardware import A40
from engines.latency.model_shape import SHAPES
from engines.pat.costs import SwitchCosts
from engines.rollout.moves import Reshape
from engines.simulate.trace import Trace
from schemas.rollout import RequestId, Split

SHAPE = SHAPES["LLaMA3.1-8B"]
LATENCY = AnalyticLatency(SHAPE, A40)
COSTS = SwitchCosts(
    LATENCY, SHAPE.kv_bytes_per_token, SHAPE.num_kv_heads, link_bytes_per_s=2e9, wake_s=3.0
)
FREE = replace(COSTS, link_bytes_per_s=math.inf, wake_s=0.0)
NODES = Nodes(LATENCY, num_gpus=8, tp_degree=2, higher_tp_degrees=(4, 8))
PROMPT_TOKENS = 100


def trace(lengths) -> Trace:
    num = len(lengths)
    return Trace(
        pa.table(
            {
                "step": [1] * num,
                "epoch": [0] * num,
                "prompt_key": [f"p{i}" for i in range(num)],
                "sample_index": [0] * num,
                "prompt_tokens": [PROMPT_TOKENS] * num,
                "response_tokens": np.array(lengths, dtype=np.int64),
            }
        ),
        "test",
    )


class Scripted:
    """Switches when so few are left, to this TP degree."""

    def __init__(self, pools, script, move_kv=True):
        self.pools, self.script, self.move_kv = pools, dict(script), move_kv

    def decide(self, view):
        return [move for pool in self.pools if (move := self._look(pool, view))]

    def _look(self, pool, view):
        own = [e for e in view.engines if any(e.engine in of for of in pool.engines.values())]
        num_left = sum(len(engine.progress) for engine in own)
        due = [num for num in self.script if num_left <= num * len(own) * own[0].tp_degree / 8]
        if not own or not due or self.script[min(due)] == own[0].tp_degree or not num_left:
            return None
        return Reshape(pool.index, self.script[min(due)], self.move_kv)


def scripted(lengths, script, *, move_kv=True, nodes=NODES, costs=COSTS, **options):
    return simulate_pools(
        trace(lengths), nodes, costs, lambda pools: Scripted(pools, script, move_kv), **options
    )


def planned(lengths, nodes=NODES, costs=COSTS):
    ids = [RequestId(Split.TRAIN, 1, f"p{i}", 0) for i in range(len(lengths))]

    def controller(pools):
        outlook = Outlook(
            Forecaster(nodes.latency),
            Exact(dict(zip(ids, lengths, strict=True))),
            {id.prompt_key: PROMPT_TOKENS for id in ids},
        )
        effects = Effects(nodes.latency, {pool.index: pool for pool in pools}, costs)
        return Controller([Reshaping()], outlook, effects)

    return simulate_pools(trace(lengths), nodes, costs, controller)


LENGTHS = [400, 900, 500, 650, 300, 800, 3000, 450, 700, 600, 350, 2000]


def by_request(run):
    return {r.request.id: len(r.generated.token_ids) for r in run.rollouts}


def works_at_once(run):
    """Seconds in which engines of two layouts of a pool are both busy."""
    shared_s = 0.0
    for pool in run.pools:
        for one, other in combinations(pool.engines, 2):
            spans = [
                [at for engine in pool.engines[tp] for at in run.timelines[engine]]
                for tp in (one, other)
            ]
            shared_s += sum(
                max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s) - 1e-6)
                for a in spans[0]
                for b in spans[1]
            )
    return shared_s


@pytest.mark.parametrize("move_kv", [True, False])
@pytest.mark.parametrize("num_gpus", [8, 16])
def test_every_token_is_there_and_layouts_take_turns(num_gpus, move_kv):
    nodes = replace(NODES, num_gpus=num_gpus)
    run = scripted(LENGTHS, {8: 4, 3: 8}, move_kv=move_kv, nodes=nodes)
    assert by_request(run) == by_request(simulate_pools(trace(LENGTHS), nodes))
    assert works_at_once(run) == 0.0
    assert [s.to_tp for s in run.switches if s.pool == 0] == [4, 8]
    assert {s.moved_kv for s in run.switches} == {move_kv}
    assert run.outcome.moves.num_switches == len(run.switches) == 2 * num_gpus // 8
    cached = {r.num_cached_tokens > 0 for r in run.rollouts if run.tp_degrees[r.engine] > 2}
    assert cached == {move_kv}


def test_a_switch_takes_what_the_formula_says():
    run = scripted(LENGTHS, {3: 8})
    (switch,) = run.switches
    old, new = ({e: i for e, i in run.timelines.items() if run.tp_degrees[e] == t} for t in (2, 8))
    stopped_s = {e: max(i.end_s for i in of) for e, of in old.items()}
    moved = [r for r in run.rollouts if run.tp_degrees[r.engine] == 8]
    assert len(moved) == 3
    saved = {r.request.kv.path: 0 for r in moved}
    for rollout in moved:
        saved[rollout.request.kv.path] += rollout.request.kv.num_tokens
    per_token_s = SHAPE.kv_bytes_per_token / 2e9
    saved_s = max(
        stopped_s[int(path.split()[1])] + tokens * per_token_s / 2 for path, tokens in saved.items()
    )
    loaded_s = sum(saved.values()) * per_token_s / 8
    first_s = min(i.start_s for of in new.values() for i in of)
    assert first_s == pytest.approx(saved_s + 3.0 + loaded_s)
    assert switch.seconds == pytest.approx(first_s - switch.decided.at_s)


def test_going_back_to_a_layout_takes_its_time_too():
    run = scripted(LENGTHS, {8: 4, 5: 8, 3: 4})
    assert [s.to_tp for s in run.switches] == [4, 8, 4]
    assert all(3.0 < switch.seconds < 6.0 for switch in run.switches)
    assert works_at_once(run) == 0.0


def test_a_rank_never_has_less_than_a_head():
    few = replace(COSTS, num_kv_heads=2)
    assert switch_times(few, 8).save_s(100) == switch_times(few, 2).save_s(100)
    assert switch_times(COSTS, 8).save_s(100) == switch_times(COSTS, 2).save_s(100) / 4


def test_only_so_many_switches_are_made():
    run = scripted(LENGTHS, {8: 4, 3: 8}, max_switches=1)
    assert [s.to_tp for s in run.switches] == [4]
    assert run.outcome.moves.num_switches == 1


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(50, 6000), min_size=1, max_size=24), st.sampled_from([2, 4]))
def test_free_switches_never_cost(lengths, base):
    """Forecasts are off by what reporting is late, and by merged segments."""
    higher = tuple(tp for tp in (4, 8) if tp > base)
    nodes = replace(NODES, tp_degree=base, higher_tp_degrees=higher)
    static = simulate_pools(trace(lengths), replace(nodes, higher_tp_degrees=()))
    run = planned(lengths, nodes, FREE)
    assert run.step_s <= 1.01 * static.step_s
    assert by_request(run) == by_request(static)
    assert works_at_once(run) == 0.0


def test_a_tail_is_worth_a_switch_and_free_ones_are_worth_more():
    static = simulate_pools(trace(LENGTHS), replace(NODES, higher_tp_degrees=()))
    paid, free = planned(LENGTHS), planned(LENGTHS, costs=FREE)
    assert paid.switches
    assert free.step_s < paid.step_s < static.step_s


def test_uniform_lengths_never_switch_from_the_best_layout():
    lengths = [4000] * 128
    static = {
        tp: simulate_pools(trace(lengths), replace(NODES, tp_degree=tp, higher_tp_degrees=()))
        for tp in (2, 4, 8)
    }
    best = min(static, key=lambda tp: static[tp].step_s)
    assert best == 4
    run = planned(lengths, replace(NODES, tp_degree=4, higher_tp_degrees=(8,)))
    assert not run.switches
    assert run.step_s == static[4].step_s
