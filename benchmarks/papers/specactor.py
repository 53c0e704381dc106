"""SpecActor's ablation (section 5.4, Fig. 13; 5.2) in its setting: what each of its parts brings.

    veRL              no drafting; also on twice the GPUs
    coupled           0.5B drafts on the verifier's GPUs in turn (vanilla speculation); n-gram too
    disaggregated     drafters on GPUs of their own, in turn still
    decoupled         Algorithm 1: drafters on GPUs out of the same 256, which go on meanwhile (4.1)
    reconfiguration   Algorithm 2: window and mode by request (4.1)
    best-of-N         Algorithm 3: freed engines race the slowest requests (4.2)

Beside these stands what nobody printed: drafting chosen by the running batch, none where it does
not pay; coupled, coupled with best-of-N, and with all parts of the paper; each of these with
prompts placed by their lengths in the epoch before (ranked), or so that engines end together
(`engines.histopipe.even_ends`); and all parts with drafts from history beside the models' (fused),
which are assumed to be right in a share of what these guess wrong.

What drafters cost and how often they are right is assumed: one point here, a grid in
`benchmarks.papers.specactor_grid`. No schedule is faster than the bound
(`benchmarks.papers.bound`).

The policies are those of a real run with the plan's settings, and so race with the window that is
the fastest for a drafter's mean acceptance.

Deviations: naive disaggregation takes the plan's layout; an engine freed with drafter GPUs runs any
drafter at once, as models wait in host memory (4.3), and prefills what it races anew, where the
paper transfers a part of the KV cache; an engine without drafter GPUs races coupled.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.papers.bound import KnownDrafter, RolloutBound, VerifierCosts, bound_rollout
from benchmarks.papers.by_batch import SettingByBatch
from benchmarks.papers.drafters import (
    DRAFTERS,
    LARGE,
    LATENCY,
    NGRAM,
    SMALL,
    SpeculativeLatency,
    draw_acceptances,
    fuse_history,
)
from benchmarks.papers.generate import TraceSpec, generate
from benchmarks.papers.plausible import Assumption
from benchmarks.papers.real_run import asked_seldom, bare_plan
from benchmarks.papers.settings import Speculation
from engines.control.techniques import StepFacts, plan_policies
from engines.histopipe.even_ends import step_requests_of
from engines.histopipe.placement import end_together
from engines.rollout.moves import Policy
from engines.simulate.batching import ChooseDrafting
from engines.simulate.cluster import (
    PLACEMENTS,
    Placement,
    PolicySet,
    Simulation,
    even,
    simulate_step,
    step_requests,
)
from engines.simulate.run_config import run_config
from engines.simulate.trace import Trace
from engines.specactor.ladder import Ladder
from engines.specactor.planner import Cluster, ExecutionPlan, plan_decoupled
from schemas.config import TrainConfig
from schemas.rollout import DraftSetting, RequestId
from schemas.simulate import ClusterLayout

BASELINE = "veRL"
COUPLED = "coupled"
DISAGGREGATED = "disaggregated"
BY_BATCH = "coupled, by batch"
PARTS = ("decoupled", "reconfiguration", "best-of-N")
"""Parts of SpecActor, each upon those before it."""
WINDOW = 3
"""Window of speculation that is not planned: that of Fig. 4 and 9."""
MAX_WINDOW = 16
MAX_RACED = 8
"""Copies on a freed engine (b_max). Assumed."""
CONTEXT_TOKENS = 2048
"""Typical context of a request, for what is planned: a prompt and half of a mean response."""
REPORT_S = 5.0
"""How often virtual engines tell how far their requests are: some 300 tokens each."""
LAST_SHARE = 0.01
"""Share of the rollouts that are called the last."""
RANKED = "ranked"
FUSED = "fused"
ENDS = "even ends"


@dataclass(frozen=True, slots=True)
class SpeculationVariant:
    """One way to roll out the same requests."""

    name: str
    num_engines: int
    drafting: DraftSetting | None = None
    drafter_gpus: int = 1
    choose_drafting: ChooseDrafting | None = None
    policies: Callable[[], tuple[Policy, ...]] = tuple
    placement: Placement = even
    fused: bool = False
    """Whether history drafts beside the models."""


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """A variant, simulated."""

    trace: str
    variant: SpeculationVariant
    simulation: Simulation
    speedup: float
    """Over veRL."""
    over_coupled: float
    gain: float | None
    """Gain of a part over the part before it, of the first over coupled speculation; None: it is
    no part of the paper's."""

    @property
    def step_s(self) -> float:
        return self.simulation.step.step_s

    @property
    def last_rate(self) -> float | None:
        rollouts = self.simulation.rollouts
        last = rollouts[-max(1, round(LAST_SHARE * len(rollouts))) :]
        drafted = sum(rollout.generated.num_draft_tokens for rollout in last)
        accepted = sum(rollout.generated.num_accepted_tokens for rollout in last)
        return accepted / drafted if drafted else None


@dataclass(frozen=True, slots=True)
class SpeculationAblation:
    """Rows that were simulated, and the choices behind them."""

    rows: tuple[SpeculationRow, ...]
    plans: Mapping[str, ExecutionPlan]
    """Plans by trace."""
    bounds: Mapping[str, RolloutBound]
    """Seconds that no schedule beats, by trace."""
    fused_bounds: Mapping[str, RolloutBound]
    """The same where history drafts beside the models."""
    coupled_at_256: float
    """Speed-up of coupled speculation over decoding with 256 requests; below 1 it costs."""


@dataclass(frozen=True, slots=True)
class Case:
    """The requests of a step, how often drafters are right, and what Algorithm 1 plans for them."""

    rows: Trace
    layout: ClusterLayout
    """Layout of engines without drafter GPUs, on all GPUs."""
    acceptances: Mapping[RequestId, Mapping[str, float]]
    seed: int
    lengths: Mapping[str, float]
    """Median response tokens of each prompt in the epoch before, as far as it was drawn there."""
    latency: SpeculativeLatency = LATENCY

    @classmethod
    def draw(cls, spec: TraceSpec, layout: ClusterLayout, step: int, seed: int) -> "Case":
        epoch = spec.steps_per_epoch
        first = (step - 1) // epoch * epoch + 1
        before = range(max(1, first - epoch), first)
        rows = generate(spec, seed, [step])
        lengths = generate(spec, seed, [*before, step]).history(step)
        ids = step_requests(rows, step)[1]
        return cls(rows, layout, draw_acceptances(ids, seed), seed, lengths)

    def assuming(self, assumed: Assumption) -> "Case":
        """The same requests with other drafters."""
        acceptances = draw_acceptances(self.acceptances, self.seed, assumed.acceptance)
        latency = replace(LATENCY, draft_scale=assumed.draft_scale)
        return replace(self, acceptances=acceptances, latency=latency)

    def fused(self) -> "Case":
        """The same with drafts from history beside those of models."""
        return replace(self, acceptances=fuse_history(self.acceptances))

    @property
    def num_gpus(self) -> int:
        return self.layout.num_engines * self.layout.tp_degree

    @property
    def prompt_keys(self) -> list[str]:
        return self.rows.table["prompt_key"].unique().to_pylist()

    def mean_acceptance(self, drafter: str) -> float:
        return fmean(of_request[drafter] for of_request in self.acceptances.values())

    def plan(self) -> ExecutionPlan:
        verifiers = (self.layout.tp_degree,)
        cluster = Cluster(len(self.rows), self.num_gpus, verifiers, CONTEXT_TOKENS)
        p = self.mean_acceptance(SMALL)
        return plan_decoupled(cluster, self.latency, SMALL, p, max_window=MAX_WINDOW)

    def config(self, plan: ExecutionPlan, *, race: bool = True, **sections: Any) -> TrainConfig:
        """Config of a real run with this plan."""
        specactor = {
            "draft_models": [{"name": name, "path": "of-the-paper"} for name in (SMALL, LARGE)],
            "drafter": SMALL,
            "window": plan.window,
            "coupled": plan.coupled,
            "max_race_batch": MAX_RACED,
            "race": race,
        }
        return run_config(
            int(self.rows.column("response_tokens").max()),
            **{
                "rollout": {"tp_degree": plan.verifier_gpus, "max_num_seqs": len(self.rows)},
                "drafting": {"enabled": False, "max_draft": MAX_WINDOW},
                "specactor": specactor,
            }
            | sections,
        )

    def facts(self, plan: ExecutionPlan) -> StepFacts:
        """Facts that a real run knows beforehand."""
        keys = self.prompt_keys
        drafting = DraftSetting(SMALL, plan.window, plan.coupled)
        return StepFacts(
            plan=bare_plan(self.rows.steps[0], keys, len(self.rows) // len(keys), drafting),
            ladder=Ladder(
                self.latency, plan.verifier_gpus, tuple(DRAFTERS), CONTEXT_TOKENS, MAX_WINDOW
            ),
            acceptances={name: self.mean_acceptance(name) for name in DRAFTERS},
        )

    def policies(self, plan: ExecutionPlan, *, race: bool = True) -> tuple[Policy, ...]:
        """Those of a real run, each deciding for itself."""
        policies = plan_policies(self.config(plan, race=race), self.facts(plan))
        return asked_seldom(policies, REPORT_S)

    def simulate(self, variant: SpeculationVariant) -> Simulation:
        own = {"num_engines": variant.num_engines, "max_num_seqs": len(self.rows)}
        layout = self.layout.model_copy(update=own | {"num_gpus": None})
        policies = variant.policies()
        policy_set = PolicySet(
            name=variant.name,
            policies=policies,
            report_s=REPORT_S if policies else None,
            drafting=variant.drafting,
            choose_drafting=variant.choose_drafting,
            placement=variant.placement,
        )
        latency = replace(self.latency, drafter_gpus=variant.drafter_gpus)
        known = fuse_history(self.acceptances) if variant.fused else self.acceptances
        return simulate_step(self.rows, layout, latency, policy_set, self.lengths, known)

    def bound(self) -> RolloutBound:
        """No schedule on these GPUs is faster, even were the drafters on others."""
        of = self.latency
        costs = VerifierCosts(of.step_s, of.sequence_s, of.token_s)
        known = self.acceptances.values()
        drafters = [
            KnownDrafter(of.draft_s(name, 1, 1), np.array([own[name] for own in known]))
            for name in DRAFTERS
        ]
        columns = (self.rows.column(f"{what}_tokens") for what in ("prompt", "response"))
        return bound_rollout(costs, *columns, drafters, self.layout.num_engines)


def simulate_speculation(
    speculation: Speculation, layout: ClusterLayout, seed: int, progress: Callable[[str], None]
) -> SpeculationAblation:
    """Every variant on every trace; `progress` is told the name of each."""
    step = speculation.step
    cases = {spec.name: Case.draw(spec, layout, step, seed) for spec in speculation.specs}
    rows = [row for name, case in cases.items() for row in _ablate(name, case, progress)]
    return SpeculationAblation(
        rows=tuple(rows),
        plans={name: case.plan() for name, case in cases.items()},
        bounds={name: case.bound() for name, case in cases.items()},
        fused_bounds={name: case.fused().bound() for name, case in cases.items()},
        coupled_at_256=coupled_speedup(next(iter(cases.values())), 256),
    )


def coupled_speedup(case: Case, batch: int) -> float:
    ladder = Ladder(case.latency, case.layout.tp_degree, (SMALL,), CONTEXT_TOKENS)
    return ladder.speedup(SMALL, case.mean_acceptance(SMALL), batch, WINDOW)


def _ablate(trace: str, case: Case, progress: Callable[[str], None]) -> Iterator[SpeculationRow]:
    times_s: dict[str, float] = {}
    before = COUPLED
    for variant in variants(case):
        progress(f"{trace}, {variant.name}")
        simulation = case.simulate(variant)
        step_s = times_s[variant.name] = simulation.step.step_s
        gain = None
        if variant.name in PARTS:
            gain, before = times_s[before] / step_s, variant.name
        # The first two are those that the others are compared with.
        over_coupled = times_s.get(COUPLED, step_s) / step_s
        speedup = times_s[BASELINE] / step_s
        yield SpeculationRow(trace, variant, simulation, speedup, over_coupled, gain)


def variants(case: Case) -> list[SpeculationVariant]:
    """veRL and coupled speculation, what else there is to compare with, the paper's parts, and what
    nobody printed, without and with prompts that are placed by their lengths."""
    plan, num, tp_degree = case.plan(), case.layout.num_engines, case.layout.tp_degree
    apart = partial(_apart, case, plan)
    decoupled, reconfiguration, best_of_n = PARTS
    ahead = DraftSetting(SMALL, plan.window, coupled=False)
    policies = partial(case.policies, plan)
    alone = partial(case.policies, replace(plan, drafter_gpus=0))
    by_batch = partial(SettingByBatch, case.latency, tp_degree, SMALL, case.mean_acceptance(SMALL))
    gated = SpeculationVariant(BY_BATCH, num, choose_drafting=by_batch(modes=(True,)))
    baseline = SpeculationVariant(BASELINE, num)
    at_once = apart(decoupled, drafting=ahead)
    raced = replace(gated, name=f"{BY_BATCH}, best-of-N", policies=alone)
    whole = apart(best_of_n, drafting=ahead, policies=policies)
    return [
        baseline,
        SpeculationVariant(COUPLED, num, DraftSetting(SMALL, WINDOW)),
        SpeculationVariant(f"{BASELINE}, 2x GPUs", 2 * num),
        SpeculationVariant("n-gram", num, DraftSetting(NGRAM, WINDOW)),
        apart(DISAGGREGATED, drafting=DraftSetting(SMALL, WINDOW)),
        at_once,
        apart(reconfiguration, drafting=ahead, policies=partial(policies, race=False)),
        whole,
        gated,
        raced,
        apart(
            f"{best_of_n}, by batch",
            choose_drafting=by_batch(modes=(True, False)),
            policies=policies,
        ),
        *map(ranked, (baseline, at_once, raced, whole)),
        (fused := _fused(case)),
        ranked(fused),
        ended(case, plan, whole),
        ended(case, plan, fused),
    ]


def _fused(case: Case) -> SpeculationVariant:
    """All parts, with drafts from history beside the models'."""
    fused = case.fused()
    plan = fused.plan()
    return _apart(
        case,
        plan,
        f"{FUSED}, {PARTS[-1]}",
        drafting=DraftSetting(SMALL, plan.window, coupled=False),
        policies=partial(fused.policies, plan),
        fused=True,
    )


def _apart(case: Case, plan: ExecutionPlan, name: str, **how: Any) -> SpeculationVariant:
    """A variant with drafters on GPUs of their own."""
    group = plan.drafter_gpus + plan.verifier_gpus
    return SpeculationVariant(name, case.num_gpus // group, drafter_gpus=plan.drafter_gpus, **how)


def ended(case: Case, plan: ExecutionPlan, variant: SpeculationVariant) -> SpeculationVariant:
    """The same with prompts placed so that engines end together, by the same lengths."""

    def step_s(batch: int) -> float:
        context_tokens = batch * CONTEXT_TOKENS
        return case.latency.verify_s(plan.verifier_gpus, batch, context_tokens, plan.window)

    placement = partial(
        end_together,
        step_requests=step_requests_of(step_s, len(case.rows) // variant.num_engines),
        group_size=len(case.rows) // len(case.prompt_keys),
        max_num_seqs=len(case.rows),
    )
    return replace(variant, name=f"{ENDS}, {variant.name}", placement=placement)


def ranked(variant: SpeculationVariant) -> SpeculationVariant:
    """The same with prompts placed by their lengths in the epoch before."""
    return replace(variant, name=f"{RANKED}, {variant.name}", placement=PLACEMENTS[RANKED])
