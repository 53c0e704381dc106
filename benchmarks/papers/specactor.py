"""SpecActor's ablation (5.4, Fig. 13) in its setting: what each of its parts brings.

    veRL              no drafting; also on twice the GPUs
    coupled           0.5B drafts on the verifier's GPUs in turn (vanilla speculation); n-gram too
    disaggregated     drafters on GPUs of their own, still in turn
    decoupled         Algorithm 1: drafters on GPUs out of the same 256, which do not wait (4.1)
    reconfiguration   Algorithm 2: window and mode by request (4.1)
    best-of-N         Algorithm 3: freed engines race the slowest requests (4.2)
    even ends         refrain's: best-of-N, with prompts placed so that engines end together
                      (`engines.histopipe.even_ends`), by their lengths in the epoch before

Deviations: naive disaggregation takes the plan's layout. An engine freed with drafter GPUs runs any
drafter at once, as models wait in host memory (4.3). A race prefills again, where the paper sends a
part of the KV cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.papers.drafters import NGRAM, SMALL
from benchmarks.papers.settings import Setting
from benchmarks.papers.speculation_case import CONTEXT_TOKENS, Case, SpeculationVariant
from engines.histopipe.even_ends import step_requests_of
from engines.histopipe.placement import end_together
from engines.simulate.cluster import Simulation
from engines.specactor.ladder import Ladder
from engines.specactor.planner import ExecutionPlan
from schemas.rollout import DraftSetting

BASELINE = "veRL"
COUPLED = "coupled"
DISAGGREGATED = "disaggregated"
PARTS = ("decoupled", "reconfiguration", "best-of-N")
"""Parts of SpecActor. Each adds to those before it."""
WHOLE = PARTS[-1]
ENDS = f"even ends, {WHOLE}"
WINDOW = 3
"""Window without a plan: that of Fig. 4 and 9."""
LAST_SHARE = 0.01
"""Share of the rollouts that count as the last."""


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """A simulated variant."""

    variant: SpeculationVariant
    simulation: Simulation
    speedup: float
    """Over veRL."""
    over_coupled: float
    gain: float | None
    """Gain of a part over the part before it, of the first over coupled drafting. None: no part."""

    @property
    def step_s(self) -> float:
        return self.simulation.step.step_s

    @property
    def last_rate(self) -> float | None:
        """Acceptance rate of the last rollouts."""
        rollouts = self.simulation.rollouts
        last = rollouts[-max(1, round(LAST_SHARE * len(rollouts))) :]
        drafted = sum(rollout.generated.num_draft_tokens for rollout in last)
        accepted = sum(rollout.generated.num_accepted_tokens for rollout in last)
        return accepted / drafted if drafted else None


@dataclass(frozen=True, slots=True)
class SpeculationAblation:
    """All variants, and the plan behind them."""

    rows: tuple[SpeculationRow, ...]
    plan: ExecutionPlan
    coupled_at_256: float
    """Speed-up of coupled drafting over decoding with 256 requests. Below 1 it costs."""


def simulate_speculation(
    setting: Setting, step: int, seed: int, progress: Callable[[str], None]
) -> SpeculationAblation:
    """Simulate every variant. `progress` gets the name of each first."""
    case = Case.draw(setting.spec, setting.layout, step, seed)
    rows = tuple(_ablate(case, progress))
    return SpeculationAblation(rows, case.plan(), coupled_speedup(case, 256))


def coupled_speedup(case: Case, batch: int) -> float:
    """Return the speed-up of coupled drafting over decoding in a batch."""
    ladder = Ladder(case.latency, case.layout.tp_degree, (SMALL,), CONTEXT_TOKENS)
    return ladder.speedup(SMALL, case.mean_acceptance(SMALL), batch, WINDOW)


def _ablate(case: Case, progress: Callable[[str], None]) -> Iterator[SpeculationRow]:
    times_s: dict[str, float] = {}
    before = COUPLED
    for variant in variants(case):
        progress(variant.name)
        simulation = case.simulate(variant)
        step_s = times_s[variant.name] = simulation.step.step_s
        gain = None
        if variant.name in PARTS:
            gain, before = times_s[before] / step_s, variant.name
        # The first two are the baselines of the others.
        over_coupled = times_s.get(COUPLED, step_s) / step_s
        speedup = times_s[BASELINE] / step_s
        yield SpeculationRow(variant, simulation, speedup, over_coupled, gain)


def variants(case: Case) -> list[SpeculationVariant]:
    """Return veRL and coupled drafting, the other baselines, the paper's parts, and even ends."""
    plan, num = case.plan(), case.layout.num_engines
    apart = partial(_apart, case, plan)
    decoupled, reconfiguration, best_of_n = PARTS
    ahead = DraftSetting(SMALL, plan.window, coupled=False)
    policies = partial(case.policies, plan)
    whole = apart(best_of_n, drafting=ahead, policies=policies)
    return [
        SpeculationVariant(BASELINE, num),
        SpeculationVariant(COUPLED, num, DraftSetting(SMALL, WINDOW)),
        SpeculationVariant(f"{BASELINE}, 2x GPUs", 2 * num),
        SpeculationVariant("n-gram", num, DraftSetting(NGRAM, WINDOW)),
        apart(DISAGGREGATED, drafting=DraftSetting(SMALL, WINDOW)),
        apart(decoupled, drafting=ahead),
        apart(reconfiguration, drafting=ahead, policies=partial(policies, race=False)),
        whole,
        _ended(case, plan, whole),
    ]


def _apart(case: Case, plan: ExecutionPlan, name: str, **how: Any) -> SpeculationVariant:
    """Return a variant with drafters on GPUs of their own."""
    group = plan.drafter_gpus + plan.verifier_gpus
    return SpeculationVariant(name, case.num_gpus // group, drafter_gpus=plan.drafter_gpus, **how)


def _ended(case: Case, plan: ExecutionPlan, variant: SpeculationVariant) -> SpeculationVariant:
    """Return the variant with prompts placed so that engines end together."""

    def step_s(batch: int) -> float:
        context_tokens = batch * CONTEXT_TOKENS
        return case.latency.verify_s(plan.verifier_gpus, batch, context_tokens, plan.window)

    placement = partial(
        end_together,
        step_requests=step_requests_of(step_s, len(case.rows) // variant.num_engines),
        group_size=len(case.rows) // len(case.prompt_keys),
        max_num_seqs=len(case.rows),
    )
    return replace(variant, name=ENDS, placement=placement)
