"""One step on virtual engines in a paper's setting, by the real coordinator and policies.

    base layout, e.g. 4 engines of TP 2 ─► withdrawn, KV cache saved ─► 1 engine of TP 8
                                             └ step in progress, save_s   └ wake_s, load_s

Each node is a pool. Engines of all its TP degrees exist from the start; those of higher degrees are
parked with current weights, so a switch loads none. `engines.control.techniques` builds the
policies, as in a real run. They know what a run knows when a step begins: prompts, lengths of the
epoch before, and mean acceptances.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from refrain.engines.control.reshaping import MissedSavings
from refrain.engines.control.techniques import (
    MoveModel,
    StepInputs,
    expected_lengths,
    plan_policies,
    tokens_to_come,
)
from refrain.engines.latency.interface import Latency
from refrain.engines.pat.costs import SwitchCosts
from refrain.engines.pat.remaining import Remaining
from refrain.engines.rollout.moves import (
    EngineView,
    FirstLayout,
    Move,
    Policy,
    Reshape,
    RolloutView,
)
from refrain.engines.rollout.stage import Outcome
from refrain.engines.simulate.batching import Interval
from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.cluster import PolicySet, even, roll_out, step_requests
from refrain.engines.simulate.engine import SwitchTimes, VirtualEngine
from refrain.engines.simulate.trace import Trace
from refrain.schemas.config import TrainConfig
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import LengthHistory, RequestId, Rollout, RolloutRequest

WARM_UP = 8
"""Steps before the measured ones. A change of the layout in which steps begin may take several."""


@dataclass(frozen=True)
class Scene:
    """A step in a paper's setting: requests, engines, and what is known beforehand."""

    config: TrainConfig
    """Config of a real run with the techniques of the scene."""
    rows: Trace
    latency: Latency
    tp_degrees: Mapping[int, int]
    """TP degree of every engine by index, parked ones included."""
    pools: tuple[Pool, ...]
    costs: SwitchCosts
    """Costs of a switch, both predicted and true."""
    lengths: Mapping[str, LengthHistory]
    """Lengths of prompts in the epoch before."""
    inputs: StepInputs
    """Further things that a real run knows beforehand."""
    kv_capacity_tokens: Mapping[int, int] = field(default_factory=dict)
    """KV-cache capacity of one engine in tokens, by TP degree. No entry: no bound."""
    report_s: float = 1.0
    """Seconds between two reports of an engine."""
    opens: bool = True
    """As of `MoveModel`."""
    missed_savings: MissedSavings = field(default_factory=MissedSavings)
    """Missed savings, as of `MoveModel`. Consecutive steps share one object."""

    def settled(self) -> "Scene":
        """Return the scene after some steps like it, which may have changed the first layout."""
        scene = self
        for _ in range(WARM_UP):
            queued: dict[int, dict[RequestId, int]] = {index: {} for index in scene.living}
            for index, request in scene.placed():
                queued[index][request.id] = 0
            engines = (EngineView(i, q, tp_degree=scene.tp_degrees[i]) for i, q in queued.items())
            view = RolloutView(0.0, tuple(engines), 0, len(scene.rows))
            moves = [
                m for p in scene.policies() if isinstance(p, FirstLayout) for m in p.begin(view)
            ]
            scene = scene.beginning({move.pool: move.tp_degree for move in moves})
        return scene

    def placed(self) -> list[tuple[int, RolloutRequest]]:
        """Return each request with the engine on which it begins."""
        requests, _ = step_requests(self.rows, self.rows.steps[0])
        groups = even(list(requests), {}, len(self.living))
        return [(self.living[g.engine], r) for g in groups for r in requests[g.prompt_key]]

    def after(self, run: "SceneRun") -> "Scene":
        """Return the scene with the first layouts of that run."""
        return self.beginning(run.begun)

    def beginning(self, degrees: Mapping[int, int]) -> "Scene":
        """Return the scene with other first TP degrees, by pool."""
        firsts = {pool.index: pool.first for pool in self.pools} | dict(degrees)
        pools = (replace(pool, first=firsts[pool.index]) for pool in self.pools)
        return replace(self, pools=tuple(pools))

    @property
    def living(self) -> tuple[int, ...]:
        """Engines of the layouts in which the step begins."""
        off = {index for pool in self.pools for index in pool.standby}
        return tuple(index for index in sorted(self.tp_degrees) if index not in off)

    def policies(self) -> tuple[Policy, ...]:
        """Build the policies of a real run with this config."""
        model = MoveModel(
            latency=self.latency,
            costs=self.costs,
            pools=self.pools,
            missed_savings=self.missed_savings,
            remaining=self.remaining(),
            prompt_tokens=self.prompt_tokens,
            opens=self.opens,
        )
        to_come = tokens_to_come(self.config, self.lengths)
        # Without a ladder no draft setting changes within the step.
        ladder = self.inputs.ladder if self.config.specactor.race else None
        inputs = replace(self.inputs, to_come=to_come, move_model=model, ladder=ladder)
        return plan_policies(self.config, inputs)

    def remaining(self) -> Remaining:
        """Return what policies assume about the remaining tokens."""
        return expected_lengths(self.config, self.lengths)

    @cached_property
    def prompt_tokens(self) -> dict[str, int]:
        columns = ("prompt_key", "prompt_tokens")
        keys, tokens = (self.rows.table[column].to_pylist() for column in columns)
        return dict(zip(keys, tokens, strict=True))


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch of a pool to another TP degree."""

    move: Reshape
    at_s: float
    """Time of the decision, in seconds since the step began."""


@dataclass(frozen=True, slots=True)
class SceneRun:
    """A simulated scene and its switches."""

    scene: Scene
    step_s: float
    rollouts: tuple[Rollout, ...]
    """Rollouts by finish time."""
    timelines: Mapping[int, Sequence[Interval]]
    """When each engine was busy, by index."""
    outcome: Outcome
    switches: tuple[Switch, ...]
    begun: Mapping[int, int]
    """TP degree in which each pool began."""


class ObservedPolicy:
    """Records the switches of a policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.made: list[Switch] = []
        self.begun: dict[int, int] = {}
        """First TP degrees that it chose, by pool."""

    def begin(self, view: RolloutView) -> Sequence[Reshape]:
        moves = self._policy.begin(view) if isinstance(self._policy, FirstLayout) else ()
        self.begun |= {move.pool: move.tp_degree for move in moves}
        return moves

    def decide(self, view: RolloutView) -> Sequence[Move]:
        moves = self._policy.decide(view)
        self.made += [
            Switch(move, view.elapsed_s)
            for move in moves
            if isinstance(move, Reshape) and not self._repeats(move)
        ]
        return moves

    def _repeats(self, move: Reshape) -> bool:
        """Whether the pool's last switch still waits for its copies."""
        own = [made.move.tp_degree for made in self.made if made.move.pool == move.pool]
        return own[-1:] == [move.tp_degree]


def run_scene(scene: Scene, policies: Sequence[Policy] = ()) -> SceneRun:
    """Roll out the step. Deterministic."""
    _, lengths = step_requests(scene.rows, scene.rows.steps[0])
    engines = [
        VirtualEngine(
            index,
            tp_degree,
            scene.latency,
            lengths,
            max_num_seqs=scene.config.rollout.max_num_seqs,
            max_context_tokens=scene.kv_capacity_tokens.get(tp_degree),
            report_s=scene.report_s if policies else None,
            switch=switch_times(scene.costs, tp_degree),
        )
        for index, tp_degree in sorted(scene.tp_degrees.items())
    ]
    observed = [ObservedPolicy(policy) for policy in policies]
    policy_set = PolicySet(policies=tuple(observed))
    rollouts, outcome = run_virtual(roll_out(engines, policy_set, scene.placed(), scene.pools))
    assert len(rollouts) == len(lengths) == len({r.request.id for r in rollouts})
    return SceneRun(
        scene=scene,
        step_s=rollouts[-1].finished_s,
        rollouts=tuple(rollouts),
        timelines={engine.index: engine.intervals for engine in engines},
        outcome=outcome,
        switches=tuple(switch for policy in observed for switch in policy.made),
        begun={pool.index: pool.base for pool in scene.pools}
        | {p: degree for policy in observed for p, degree in policy.begun.items()},
    )


def switch_times(costs: SwitchCosts, tp_degree: int) -> SwitchTimes:
    """Return the seconds of one engine's part of a switch."""
    transfer_s = partial(costs.transfer_s, tp_degree)
    return SwitchTimes(
        wake_s=costs.wake_s + costs.weights_s,
        save_s=transfer_s,
        ahead=costs.ahead,
        load_s=transfer_s,
    )
