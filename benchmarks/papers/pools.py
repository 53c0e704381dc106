"""A step on virtual engines whose GPUs change their TP degree, by the real coordinator and policy.

    base layout, e.g. 4 engines of TP 2 ─► withdrawn, keys and values saved ─► 1 engine of TP 8
                                             └ step in progress, save_s         └ wake_s, load_s

A node is a pool. Its engines of every TP degree are there from the start, those of higher ones
parked; their weights are current, so that a switch loads none.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engines.latency.interface import Latency
from engines.pat.costs import SwitchCosts
from engines.pat.layouts import EngineSpec, plan_pools
from engines.pat.switch import Comparison, Switching
from engines.rollout.moves import Reshape, RolloutView
from engines.rollout.stage import Outcome
from engines.simulate.batching import Interval
from engines.simulate.clock import run_virtual
from engines.simulate.cluster import PolicySet, even, roll_out, step_requests
from engines.simulate.engine import SwitchTimes, VirtualEngine
from engines.simulate.trace import Trace
from schemas.layout import Pool
from schemas.rollout import RequestId, Rollout

REPORT_S = 2.0
"""How often virtual engines tell how far their requests are: 100 to 600 tokens each."""

Plan = Callable[[Sequence[Pool]], Switching]
"""What decides on these pools."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """GPUs of equal nodes as engines, with the TP degrees that they may change to."""

    latency: Latency
    num_gpus: int
    tp_degree: int
    """In which a step begins."""
    higher_tp_degrees: tuple[int, ...] = ()
    kv_capacity_tokens: Mapping[int, int] | None = None
    """Of one engine, by TP degree; None: without bound."""
    gpus_per_node: int = 8
    max_num_seqs: int = 256

    def gpus(self, spec: EngineSpec) -> tuple[int, ...]:
        """That the engine is on, of all."""
        if spec.pool is None:
            first = spec.engine * spec.tp_degree
            return tuple(range(first, first + spec.tp_degree))
        return tuple(spec.pool * self.gpus_per_node + device for device in spec.devices)


@dataclass(frozen=True, slots=True)
class Switch:
    """GPUs of a pool went over to another TP degree."""

    decided: Comparison
    seconds: float
    """From the decision to the first decoding step of the slowest engine there: the step in
    progress, saving, waking, loading or computing keys and values again."""

    @property
    def to_tp(self) -> int:
        return self.decided.best.tp_degree

    @property
    def moved_kv(self) -> bool:
        return self.decided.best.switch.move_kv


@dataclass(frozen=True, slots=True)
class PooledRun:
    """A simulated step, and what was decided in it."""

    step_s: float
    num_tokens: int
    rollouts: tuple[Rollout, ...]
    timelines: Mapping[int, Sequence[Interval]]
    """When each engine was busy, by index."""
    tp_degrees: Mapping[int, int]
    """Of each engine."""
    gpus: Mapping[int, tuple[int, ...]]
    """That it is on, of all nodes."""
    pools: tuple[Pool, ...]
    outcome: Outcome
    looks: tuple[Comparison, ...] = ()
    """At every pool, in order of time."""
    switches: tuple[Switch, ...] = ()


class Observed:
    """Asks a policy and notes every look that it takes; of its switches it lets some pass."""

    def __init__(self, switching: Switching, max_switches: float) -> None:
        """`max_switches`: of each pool; infinite for as many as pay."""
        self._switching = switching
        self._max_switches = max_switches
        self.looks: list[Comparison] = []
        self.made: list[Comparison] = []

    def decide(self, view: RolloutView) -> list[Reshape]:
        before = dict(self._switching.last)
        moves = [move for move in self._switching.decide(view) if self._may(move.pool)]
        last = self._switching.last
        self.looks += [look for pool, look in last.items() if look is not before.get(pool)]
        self.made += [last[move.pool] for move in moves]
        return moves

    def _may(self, pool: int) -> bool:
        return sum(made.pool == pool for made in self.made) < self._max_switches


def simulate_pools(
    rows: Trace,
    nodes: Nodes,
    costs: SwitchCosts | None = None,
    plan: Plan | None = None,
    max_switches: float = math.inf,
) -> PooledRun:
    """Roll one step out; deterministic. Without a `plan` nothing is switched.

    Prompts are dealt evenly over the engines of the base. `costs`: what the engines take for it;
    None: nothing.
    """
    assert len(rows.steps) == 1
    requests, lengths = step_requests(rows, rows.steps[0])
    num_engines = nodes.num_gpus // nodes.tp_degree
    pools, specs = plan_pools(
        num_engines, nodes.tp_degree, nodes.higher_tp_degrees, nodes.gpus_per_node
    )
    report_s = REPORT_S if plan else None
    engines = [_engine(spec, nodes, lengths, costs, report_s) for spec in specs]
    observed = Observed(plan(pools), max_switches) if plan else None
    policies = PolicySet(policies=(observed,) if observed else ())
    groups = even(list(requests), {}, num_engines)
    placed = [(g.engine, request) for g in groups for request in requests[g.prompt_key]]
    rollouts, outcome = run_virtual(roll_out(engines, policies, placed, pools))
    timelines = {engine.index: engine.intervals for engine in engines}
    made = observed.made if observed else ()
    return PooledRun(
        step_s=rollouts[-1].finished_s,
        num_tokens=sum(lengths.values()),
        rollouts=tuple(rollouts),
        timelines=timelines,
        tp_degrees={spec.engine: spec.tp_degree for spec in specs},
        gpus={spec.engine: nodes.gpus(spec) for spec in specs},
        pools=pools,
        outcome=outcome,
        looks=tuple(observed.looks) if observed else (),
        switches=tuple(_switches(made, pools, timelines)),
    )


def _engine(
    spec: EngineSpec,
    nodes: Nodes,
    lengths: Mapping[RequestId, int],
    costs: SwitchCosts | None,
    report_s: float | None,
) -> VirtualEngine:
    return VirtualEngine(
        spec.engine,
        spec.tp_degree,
        nodes.latency,
        lengths,
        max_num_seqs=nodes.max_num_seqs,
        max_context_tokens=(nodes.kv_capacity_tokens or {}).get(spec.tp_degree),
        report_s=report_s,
        switch=switch_times(costs, spec.tp_degree) if costs else None,
    )


def switch_times(costs: SwitchCosts, tp_degree: int) -> SwitchTimes:
    """What one engine takes for its part of a switch."""

    def transfer_s(context_tokens: int) -> float:
        rank_bytes = costs.kv_bytes_per_token * context_tokens / min(tp_degree, costs.num_kv_heads)
        return rank_bytes / costs.link_bytes_per_s

    return SwitchTimes(wake_s=costs.wake_s + costs.weights_s, save_s=transfer_s, load_s=transfer_s)


def _switches(
    made: Sequence[Comparison], pools: Sequence[Pool], timelines: Mapping[int, Sequence[Interval]]
) -> Iterator[Switch]:
    for number, decided in enumerate(made):
        later_s = (other.elapsed_s for other in made[number + 1 :] if other.pool == decided.pool)
        until_s = next(later_s, math.inf)
        engines = pools[decided.pool].engines[decided.best.tp_degree]
        starts_s = (_first_step_s(timelines[i], decided.elapsed_s, until_s) for i in engines)
        # Where it is switched again before a step, it has taken all the time until then.
        ready_s = max((start_s for start_s in starts_s if start_s is not None), default=until_s)
        yield Switch(decided, ready_s - decided.elapsed_s)


def _first_step_s(intervals: Sequence[Interval], after_s: float, until_s: float) -> float | None:
    starts_s = (i.start_s for i in intervals if not i.prefill and after_s <= i.start_s < until_s)
    return next(starts_s, None)
