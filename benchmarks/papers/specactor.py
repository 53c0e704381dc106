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
(`engines.histopipe.even_ends`), and then with races by the lengths to come (hindsight: what is lost
as nobody knows them); and all parts with drafts from history beside the models' (fused), which are
assumed to be right in a share of what these guess wrong.

What drafters cost and how often they are right is assumed: one point here, a grid in
`benchmarks.papers.specactor_grid`. No schedule is faster than the bound
(`benchmarks.papers.bound`).

Deviations: naive disaggregation takes the plan's layout; an engine freed with drafter GPUs runs any
drafter at once, as models wait in host memory (4.3), and prefills what it races anew, where the
paper transfers a part of the KV cache; an engine without drafter GPUs races coupled.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.papers.bound import RolloutBound
from benchmarks.papers.drafters import (
    NGRAM,
    SMALL,
)
from benchmarks.papers.drafting_by_batch import SettingByBatch
from benchmarks.papers.settings import Speculation
from benchmarks.papers.speculation_case import CONTEXT_TOKENS, Case, SpeculationVariant
from engines.histopipe.even_ends import step_requests_of
from engines.histopipe.placement import end_together
from engines.simulate.cluster import (
    PLACEMENTS,
    Simulation,
)
from engines.specactor.ladder import Ladder
from engines.specactor.planner import ExecutionPlan
from schemas.rollout import DraftSetting
from schemas.simulate import ClusterLayout

BASELINE = "veRL"
COUPLED = "coupled"
DISAGGREGATED = "disaggregated"
BY_BATCH = "coupled, by batch"
PARTS = ("decoupled", "reconfiguration", "best-of-N")
"""Parts of SpecActor, each upon those before it."""
WINDOW = 3
"""Window of speculation that is not planned: that of Fig. 4 and 9."""
LAST_SHARE = 0.01
"""Share of the rollouts that are called the last."""
RANKED = "ranked"
FUSED = "fused"
ENDS = "even ends"
HINDSIGHT = "hindsight"


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
    small_bounds: Mapping[str, RolloutBound]
    """The same with the drafter alone that responses begin with."""
    fused_bounds: Mapping[str, RolloutBound]
    """The same with all, where history drafts beside the models."""
    coupled_at_256: float
    """Speed-up of coupled speculation over decoding with 256 requests; below 1 it costs."""


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
        small_bounds={name: case.bound([SMALL]) for name, case in cases.items()},
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
        (ends := ended(case, plan, whole)),
        ended(case, plan, fused),
        replace(
            ends,
            name=f"{HINDSIGHT}, {ends.name}",
            policies=partial(policies, hindsight=True),
            hindsight=True,
        ),
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
