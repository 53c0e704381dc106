"""One step with every technique by itself, and with all of them, as a real run would have them.

    config of a scene ─┬─ nothing
                       ├─ each technique that it switches on, without the others
                       └─ joint: all of them

In virtual time, by the real coordinator; the policies are put together as in a real run
(`engines.control.techniques`). All that they are told is known when a step begins: lengths of the
epoch before, prompts, what drafters do on average.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.papers.pools import switch_times
from benchmarks.papers.real_run import ALL, DRAFTS, NOTHING, asked_seldom, only, switched_on
from benchmarks.papers.windows import Aimd, GatedAimd
from engines.control.techniques import MoveModel, StepFacts, expected_lengths, plan_policies
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCosts
from engines.rollout.moves import Policy
from engines.rollout.stage import Outcome
from engines.simulate.batching import Interval
from engines.simulate.clock import run_virtual
from engines.simulate.cluster import PolicySet, even, roll_out, step_requests
from engines.simulate.engine import VirtualEngine
from engines.simulate.member import Acceptance, Passes
from engines.simulate.trace import Trace
from schemas.config import TrainConfig
from schemas.layout import Pool
from schemas.rollout import LengthHistory, RequestId, Rollout


@dataclass(frozen=True)
class HistoryDrafts:
    """Drafting from history that is assumed, by the paper's windows."""

    typical: Aimd
    """Windows by the mean acceptance: what the engines' gates and the step before know."""
    replays: Mapping[RequestId, Passes]
    """Acceptance of each request, by drafter; what happens."""


@dataclass(frozen=True)
class Scene:
    """A step of some paper's setting: requests, engines, and what is known."""

    config: TrainConfig
    """Config of a real run with all techniques that the scene has."""
    rows: Trace
    latency: Latency
    tp_degrees: Mapping[int, int]
    """TP degree of every engine by index, those on standby too."""
    pools: tuple[Pool, ...]
    costs: SwitchCosts
    lengths: Mapping[str, LengthHistory]
    """Lengths of prompts in the epoch before."""
    facts: StepFacts
    """Further facts that a real run knows beforehand."""
    acceptances: Mapping[RequestId, Acceptance] | None = None
    """Acceptances of draft models; what happens."""
    drafts: HistoryDrafts | None = None
    kv_capacity_tokens: Mapping[int, int] = field(default_factory=dict)
    """KV-cache capacity of one engine in tokens, by TP degree; without bound where it is not
    given."""
    report_s: float = 1.0
    """How often virtual engines tell how far they are, and policies are asked at most."""

    @property
    def techniques(self) -> tuple[str, ...]:
        return switched_on(self.config)

    def policies(self, config: TrainConfig) -> tuple[Policy, ...]:
        """Those of a real run with this config."""
        drafts = self.drafts if config.drafting.enabled else None
        model = MoveModel(
            latency=self.latency,
            costs=self.costs,
            pools=self.pools,
            remaining=expected_lengths(config, self.lengths),
            prompt_tokens=self._prompt_tokens(),
            speculation=drafts.typical.speculation if drafts else (1.0, 0),
        )
        return plan_policies(config, replace(self.facts, move_model=model))

    def _prompt_tokens(self) -> dict[str, int]:
        columns = ("prompt_key", "prompt_tokens")
        keys, tokens = (self.rows.table[column].to_pylist() for column in columns)
        return dict(zip(keys, tokens, strict=True))


@dataclass(frozen=True)
class JointRun:
    """A scene, simulated with some techniques."""

    step_s: float
    rollouts: tuple[Rollout, ...]
    timelines: Mapping[int, Sequence[Interval]]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class JointRow:
    """A setting with one technique, with all, or with none."""

    setting: str
    technique: str
    seconds: float
    speedup: float
    """Over nothing."""
    over_best_single: float | None
    """Speed-up of all together over the fastest of the others."""


def rows_of(setting: str, seconds: Mapping[str, float]) -> list[JointRow]:
    """`seconds`: by technique, of the same work."""
    best_s = min(own_s for name, own_s in seconds.items() if name not in (NOTHING, ALL))
    return [
        JointRow(
            setting, name, own_s, seconds[NOTHING] / own_s, best_s / own_s if name == ALL else None
        )
        for name, own_s in seconds.items()
    ]


def run_technique(scene: Scene, name: str) -> JointRun:
    """Run with nothing, one technique, or all of them (`JOINT`)."""
    names = {NOTHING: (), ALL: scene.techniques}.get(name, (name,))
    config = only(scene.config, names)
    return run_policies(scene, scene.policies(config), drafts=DRAFTS in names)


def run_policies(scene: Scene, policies: Sequence[Policy], *, drafts: bool = False) -> JointRun:
    """`drafts`: engines draft from history where that pays in their batch."""
    requests, lengths = step_requests(scene.rows, scene.rows.steps[0])
    assumed = scene.drafts if drafts else None
    gates = {
        tp: GatedAimd(scene.latency, tp, assumed.typical) if assumed else None
        for tp in set(scene.tp_degrees.values())
    }
    engines = [
        VirtualEngine(
            index,
            tp_degree,
            scene.latency,
            lengths,
            acceptances=scene.acceptances,
            replays=assumed.replays if assumed else None,
            choose_drafting=gates[tp_degree],
            max_num_seqs=scene.config.rollout.max_num_seqs,
            max_context_tokens=scene.kv_capacity_tokens.get(tp_degree),
            report_s=scene.report_s if policies else None,
            switch=switch_times(scene.costs, tp_degree),
        )
        for index, tp_degree in sorted(scene.tp_degrees.items())
    ]
    policy_set = PolicySet(
        policies=asked_seldom(policies, scene.report_s),
        drafting=scene.facts.plan.drafting,
        choose_drafting=gates[scene.config.rollout.tp_degree],
    )
    groups = even(list(requests), {}, scene.config.rollout.num_engines)
    placed = [(g.engine, request) for g in groups for request in requests[g.prompt_key]]
    rollouts, outcome = run_virtual(roll_out(engines, policy_set, placed, scene.pools))
    assert len(rollouts) == len(lengths) == len({r.request.id for r in rollouts})
    return JointRun(
        step_s=rollouts[-1].finished_s,
        rollouts=tuple(rollouts),
        timelines={engine.index: engine.intervals for engine in engines},
        outcome=outcome,
    )
