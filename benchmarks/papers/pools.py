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
from engines.rollout.moves import Move, Policy, Reshape, RolloutView
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

PlanPolicy = Callable[[Sequence[Pool]], Policy]
"""Maker of what decides on these pools."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """GPUs of equal nodes as engines, with the TP degrees that they may change to."""

    latency: Latency
    num_gpus: int
    tp_degree: int
    """TP degree in which a step begins."""
    higher_tp_degrees: tuple[int, ...] = ()
    kv_capacity_tokens: Mapping[int, int] | None = None
    """KV-cache capacity of one engine in tokens, by TP degree; None: without bound."""
    gpus_per_node: int = 8
    max_num_seqs: int = 256

    def gpus(self, spec: EngineSpec) -> tuple[int, ...]:
        """GPUs that the engine is on, of all."""
        if spec.pool is None:
            first = spec.engine * spec.tp_degree
            return tuple(range(first, first + spec.tp_degree))
        return tuple(spec.pool * self.gpus_per_node + device for device in spec.devices)


@dataclass(frozen=True, slots=True)
class DecidedSwitch:
    """A switch that was decided."""

    move: Reshape
    at_s: float
    """Seconds since the step began."""
    num_unfinished: int
    """Requests of the pool."""


@dataclass(frozen=True, slots=True)
class Switch:
    """GPUs of a pool went over to another TP degree."""

    decided: DecidedSwitch
    seconds: float
    """Seconds from the decision to the first decoding step of the slowest engine there: the step in
    progress, saving, waking, loading or computing keys and values again."""

    @property
    def pool(self) -> int:
        return self.decided.move.pool

    @property
    def to_tp(self) -> int:
        return self.decided.move.tp_degree

    @property
    def moved_kv(self) -> bool:
        return self.decided.move.move_kv


@dataclass(frozen=True, slots=True)
class PooledRun:
    """A simulated step, and what was decided in it."""

    step_s: float
    num_tokens: int
    rollouts: tuple[Rollout, ...]
    timelines: Mapping[int, Sequence[Interval]]
    """When each engine was busy, by index."""
    tp_degrees: Mapping[int, int]
    """TP degree of each engine."""
    gpus: Mapping[int, tuple[int, ...]]
    """GPUs that each engine is on, of all nodes."""
    pools: tuple[Pool, ...]
    outcome: Outcome
    switches: tuple[Switch, ...] = ()


class ObservedPolicy:
    """A policy whose switches are noted; some of them it may not make."""

    def __init__(self, policy: Policy, pools: Sequence[Pool], max_switches: float) -> None:
        """`max_switches`: of each pool; infinite for as many as pay."""
        self._policy, self._max_switches = policy, max_switches
        self._engines = {p.index: {e for of in p.engines.values() for e in of} for p in pools}
        self.made: list[DecidedSwitch] = []

    def decide(self, view: RolloutView) -> list[Move]:
        moves = [move for move in self._policy.decide(view) if self._may(move)]
        self.made += [
            DecidedSwitch(move, view.elapsed_s, self._num_unfinished(move.pool, view))
            for move in moves
            if isinstance(move, Reshape)
        ]
        return moves

    def _may(self, move: Move) -> bool:
        if not isinstance(move, Reshape):
            return True
        return sum(made.move.pool == move.pool for made in self.made) < self._max_switches

    def _num_unfinished(self, pool: int, view: RolloutView) -> int:
        own = (engine for engine in view.engines if engine.engine in self._engines[pool])
        return len({id for engine in own for id in engine.progress})


def simulate_pools(
    rows: Trace,
    nodes: Nodes,
    costs: SwitchCosts | None = None,
    plan: PlanPolicy | None = None,
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
    observed = ObservedPolicy(plan(pools), pools, max_switches) if plan else None
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
    """Times that one engine takes for its part of a switch."""

    def transfer_s(context_tokens: int) -> float:
        rank_bytes = costs.kv_bytes_per_token * context_tokens / min(tp_degree, costs.num_kv_heads)
        return rank_bytes / costs.link_bytes_per_s

    return SwitchTimes(wake_s=costs.wake_s + costs.weights_s, save_s=transfer_s, load_s=transfer_s)


def _switches(
    made: Sequence[DecidedSwitch],
    pools: Sequence[Pool],
    timelines: Mapping[int, Sequence[Interval]],
) -> Iterator[Switch]:
    for number, decided in enumerate(made):
        pool, at_s = decided.move.pool, decided.at_s
        until_s = next((o.at_s for o in made[number + 1 :] if o.move.pool == pool), math.inf)
        engines = pools[pool].engines[decided.move.tp_degree]
        starts_s = (_first_step_s(timelines[i], at_s, until_s) for i in engines)
        # Where it is switched again before a step, it has taken all the time until then.
        ready_s = max((start_s for start_s in starts_s if start_s is not None), default=until_s)
        yield Switch(decided, ready_s - at_s)


def _first_step_s(intervals: Sequence[Interval], after_s: float, until_s: float) -> float | None:
    starts_s = (i.start_s for i in intervals if not i.prefill and after_s <= i.start_s < until_s)
    return next(starts_s, None)
