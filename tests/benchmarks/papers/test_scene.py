"""Scenes in which GPUs change their TP degree, with the real coordinator and policies."""

import math
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.benchmarks.papers.real_run import bare_plan
from refrain.benchmarks.papers.scene import Scene, run_scene, switch_times
from refrain.engines.control.techniques import StepInputs
from refrain.engines.latency.analytic import AnalyticLatency
from refrain.engines.latency.hardware import A40
from refrain.engines.latency.model_shape import SHAPES
from refrain.engines.pat.costs import SwitchCosts
from refrain.engines.pat.layouts import plan_pools
from refrain.engines.rollout.moves import Reshape
from refrain.engines.simulate.cluster import step_requests
from refrain.engines.simulate.run_config import run_config
from refrain.engines.simulate.trace import Trace
from refrain.schemas.rollout import RequestId

SHAPE = SHAPES["LLaMA3.1-8B"]
LATENCY = AnalyticLatency(SHAPE, A40)
COSTS = SwitchCosts(
    LATENCY, SHAPE.kv_bytes_per_token, SHAPE.num_kv_heads, link_bytes_per_s=2e9, wake_s=3.0
)
FREE = replace(COSTS, link_bytes_per_s=math.inf, wake_s=0.0)
PROMPT_TOKENS = 100


@dataclass(frozen=True)
class Known:
    """The true remaining tokens. Implements `Remaining`."""

    lengths: dict[RequestId, int]
    is_known = True

    def tokens(self, generated, scenario=0.0):
        del scenario
        return {id: max(1.0, float(self.lengths[id] - num)) for id, num in generated.items()}


class KnownScene(Scene):
    """A scene whose policies know how long responses will be."""

    def remaining(self):
        return Known(step_requests(self.rows, 1)[1])


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
    """Switches to a TP degree once this few requests are left."""

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


def scene(lengths, *, num_gpus=8, base=2, higher=(4, 8), costs=COSTS):
    """Return a scene with responses of these known lengths, which begins at TP degree `base`."""
    num_engines = num_gpus // base
    pools, specs = plan_pools(num_engines, base, higher, 8)
    return KnownScene(
        config=run_config(
            8192,
            rollout={"num_engines": num_engines, "tp_degree": base},
            pat={"tp_degrees": higher},
        ),
        rows=trace(lengths),
        latency=LATENCY,
        tp_degrees={spec.engine: spec.tp_degree for spec in specs},
        pools=pools,
        costs=costs,
        lengths={},
        inputs=StepInputs(plan=bare_plan(1, [f"p{i}" for i in range(len(lengths))], 1)),
        report_s=2.0,
        opens=False,
    )


def scripted(lengths, script, *, move_kv=True, num_gpus=8, costs=COSTS):
    one = scene(lengths, num_gpus=num_gpus, costs=costs)
    return run_scene(one, [Scripted(one.pools, script, move_kv)])


def planned(lengths, **options):
    one = scene(lengths, **options)
    return run_scene(one, one.policies())


def static(lengths, base=2):
    return run_scene(scene(lengths, base=base, higher=()))


LENGTHS = [400, 900, 500, 650, 300, 800, 3000, 450, 700, 600, 350, 2000]


def by_request(run):
    return {r.request.id: len(r.generated.token_ids) for r in run.rollouts}


def taken_s(run):
    """Return the seconds from each switch to the first decoding step in the new layout."""
    ends_s = [*(switch.at_s for switch in run.switches[1:]), math.inf]
    found = []
    for switch, end_s in zip(run.switches, ends_s, strict=True):
        engines = run.scene.pools[switch.move.pool].engines[switch.move.tp_degree]
        steps = (i for engine in engines for i in run.timelines[engine] if not i.prefill)
        starts_s = [i.start_s for i in steps if switch.at_s <= i.start_s < end_s]
        found.append(min(starts_s) - switch.at_s)
    return found


def works_at_once(run):
    """Return the seconds in which two layouts of a pool are busy at the same time."""
    shared_s = 0.0
    for pool in run.scene.pools:
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
def test_scene_generates_every_token_with_alternating_layouts(num_gpus, move_kv):
    run = scripted(LENGTHS, {8: 4, 3: 8}, move_kv=move_kv, num_gpus=num_gpus)
    assert by_request(run) == by_request(run_scene(scene(LENGTHS, num_gpus=num_gpus)))
    assert works_at_once(run) == 0.0
    assert [s.move.tp_degree for s in run.switches if s.move.pool == 0] == [4, 8]
    assert {s.move.move_kv for s in run.switches} == {move_kv}
    assert run.outcome.moves.num_switches == len(run.switches) == 2 * num_gpus // 8
    cached = {r.num_cached_tokens > 0 for r in run.rollouts if run.scene.tp_degrees[r.engine] > 2}
    assert cached == {move_kv}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_switch_takes_what_the_formula_says(ahead):
    run = scripted(LENGTHS, {3: 8}, costs=replace(COSTS, ahead=ahead))
    (switch,) = run.switches
    old, new = (
        {e: i for e, i in run.timelines.items() if run.scene.tp_degrees[e] == t} for t in (2, 8)
    )
    stopped_s = {e: max(i.end_s for i in of) for e, of in old.items()}
    moved = [r for r in run.rollouts if run.scene.tp_degrees[r.engine] == 8]
    assert len(moved) == 3
    saved = {r.request.kv.path: 0 for r in moved}
    for rollout in moved:
        saved[rollout.request.kv.path] += rollout.request.kv.num_tokens
    per_token_s = SHAPE.kv_bytes_per_token / 2e9
    saved_s = max(
        stopped_s[int(path.split()[1])] + (0.0 if ahead else tokens * per_token_s / 2)
        for path, tokens in saved.items()
    )
    loaded_s = sum(saved.values()) * per_token_s / 8
    first_s = min(i.start_s for of in new.values() for i in of)
    # Saved ahead, except for tokens of the last millisecond: they came during the save.
    assert first_s == pytest.approx(saved_s + 3.0 + loaded_s, abs=1e-3 if ahead else 1e-5)
    assert first_s > switch.at_s


class Forecasting(Scripted):
    """At the first switch, notes the forecast end of the step."""

    def __init__(self, one, script, move_kv):
        super().__init__(one.pools, script, move_kv)
        (self.controller,) = one.policies()
        self.forecast_s, self.num_left = None, 0

    def decide(self, view):
        moves = super().decide(view)
        if moves and self.forecast_s is None:
            state, (move,) = self.controller.outlook.forecast(view), moves
            reshaping = self.controller.reshaping
            look = reshaping.look(reshaping.pools[move.pool], state)
            gain_s = look.gain(move.tp_degree, move_kv=move.move_kv)
            self.forecast_s = view.elapsed_s + look.stays - gain_s
            self.num_left = sum(len(engine.progress) for engine in view.engines)
        return moves


@pytest.mark.parametrize("move_kv", [True, False])
def test_a_switch_is_forecast_as_it_goes(move_kv):
    """The save ahead takes a fifth of the step. Some requests finish before the switch."""
    slow = replace(COSTS, link_bytes_per_s=3e7, wake_s=0.1)
    one = replace(scene(LENGTHS, costs=slow), report_s=0.05)
    forecasting = Forecasting(one, {8: 8}, move_kv)
    run = run_scene(one, [forecasting])
    (switch,) = run.switches
    left_s = run.step_s - switch.at_s
    assert forecasting.forecast_s - switch.at_s == pytest.approx(left_s, rel=0.01)
    moved = [r for r in run.rollouts if run.scene.tp_degrees[r.engine] == 8]
    assert (len(moved) < forecasting.num_left) == move_kv


def test_going_back_to_a_layout_takes_its_time_too():
    run = scripted(LENGTHS, {8: 4, 5: 8, 3: 4})
    assert [s.move.tp_degree for s in run.switches] == [4, 8, 4]
    assert all(3.0 < seconds < 6.0 for seconds in taken_s(run))
    assert works_at_once(run) == 0.0


def test_a_rank_never_has_less_than_a_head():
    few = replace(COSTS, num_kv_heads=2)
    assert switch_times(few, 8).save_s(100) == switch_times(few, 2).save_s(100)
    assert switch_times(COSTS, 8).save_s(100) == switch_times(COSTS, 2).save_s(100) / 4


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(50, 6000), min_size=1, max_size=24), st.sampled_from([2, 4]))
def test_free_switches_never_cost(lengths, base):
    """Forecasts are not exact: reports come late, and segments are merged."""
    higher = tuple(tp for tp in (4, 8) if tp > base)
    plain = static(lengths, base)
    run = planned(lengths, base=base, higher=higher, costs=FREE)
    assert run.step_s <= 1.01 * plain.step_s
    assert by_request(run) == by_request(plain)
    assert works_at_once(run) == 0.0
