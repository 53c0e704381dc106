"""SpecActor's ablation (5.4, Fig. 13) in its setting: what each of its parts brings.

    veRL              no drafting; also on twice the GPUs, and with samples dealt one by one
    coupled           0.5B drafts on the verifier's GPUs in turn (vanilla speculation); n-gram too
    disaggregated     drafters on GPUs of their own, still in turn
    decoupled         Algorithm 1: drafters on GPUs out of the same 256, which do not wait (4.1)
    reconfiguration   Algorithm 2: window by request (4.1)
    best-of-N         Algorithm 3: freed engines race the slowest requests (4.2)
    draft heads       refrain's: a head in each engine drafts in turn, with the best window for the
                      batch; no drafter has a GPU, and samples are dealt one by one
    even ends         refrain's: best-of-N, with prompts placed so that engines end together
                      (`engines.histopipe.even_ends`), by their lengths in the epoch before
    all together      refrain's: heads and even ends, and 16 GPUs of the 256 whose draft models help
                      the slowest requests (best-of-N)

veRL gives all samples of a prompt to one engine, so a prompt of long responses keeps its engine
longer than others. Dealt one by one, they spread over all engines: a fair veRL.

Deviations: naive disaggregation takes the plan's layout. An engine freed with drafter GPUs runs any
drafter at once, as models wait in host memory (4.3). A race prefills again, where the paper sends a
part of the KV cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from refrain.benchmarks.papers.drafters import NGRAM, SMALL
from refrain.benchmarks.papers.settings import Setting
from refrain.benchmarks.papers.speculation_case import (
    CONTEXT_TOKENS,
    Assumptions,
    Case,
    SpeculationVariant,
)
from refrain.engines.histopipe.even_ends import step_requests_of
from refrain.engines.histopipe.placement import end_together
from refrain.engines.rollout.moves import Policy
from refrain.engines.simulate.cluster import Simulation
from refrain.engines.specactor.ladder import Ladder
from refrain.engines.specactor.planner import GpuSplit
from refrain.schemas.rollout import DraftSetting

BASELINE = "veRL"
FAIR = "veRL, samples dealt one by one"
COUPLED = "coupled"
DISAGGREGATED = "disaggregated"
PARTS = ("decoupled", "reconfiguration", "best-of-N")
"""Parts of SpecActor. Each adds to those before it."""
WHOLE = PARTS[-1]
HEADS = "draft heads"
ENDS = f"even ends, {WHOLE}"
TOGETHER = "heads, even ends, best-of-N"
RACE_GPUS = 16
"""GPUs of draft models that only race. With 4 to 32 of them, the step takes the same within 1 %."""
WINDOW = 3
"""Window without a plan: that of Fig. 4 and 9."""
LAST_SHARE = 0.01
"""Share of the rollouts that count as the last."""
GRID = (
    Assumptions(spread=0.0),
    Assumptions(spread=2.0),
    Assumptions(launches=0.25),
    Assumptions(launches=2.0),
    Assumptions(head=0.5),
    Assumptions(head=0.8),
)
"""Other assumptions: under those about heads `TOGETHER` is simulated too, under others `WHOLE`."""


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """A simulated variant."""

    variant: SpeculationVariant
    simulation: Simulation
    speedup: float
    """Over veRL."""
    over_fair: float
    """Over veRL with samples dealt one by one. Of it and of veRL: 1."""
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
    grid: Mapping[Assumptions, SpeculationRow]
    """`TOGETHER` or `WHOLE` by assumptions."""
    plan: GpuSplit
    coupled_at_256: float
    """Speed-up of coupled drafting over decoding with 256 requests. Below 1 it costs."""


def simulate_speculation(
    setting: Setting, step: int, seed: int, progress: Callable[[str], None]
) -> SpeculationAblation:
    """Simulate every variant. `progress` gets the name of each first."""
    case = Case.draw(setting.spec, setting.layout, step, seed)
    rows = tuple(_ablate(case, progress))
    grid = {}
    for assumed in GRID:
        name = WHOLE if assumed.head == Assumptions().head else TOGETHER
        progress(f"{name}, {assumed}")
        at = Case.draw(setting.spec, setting.layout, step, seed, assumed)
        (variant,) = (variant for variant in variants(at) if variant.name == name)
        grid[assumed] = _row(variant, at.simulate(variant), rows, None)
    return SpeculationAblation(rows, grid, case.plan(), coupled_speedup(case, 256))


def coupled_speedup(case: Case, batch: int) -> float:
    """Return the speed-up of coupled drafting over decoding in a batch."""
    ladder = Ladder(case.latency, case.layout.tp_degree, (SMALL,), CONTEXT_TOKENS)
    return ladder.speedup(SMALL, case.mean_acceptance(SMALL), batch, WINDOW)


def _ablate(case: Case, progress: Callable[[str], None]) -> Iterator[SpeculationRow]:
    rows: list[SpeculationRow] = []
    before = COUPLED
    for variant in variants(case):
        progress(variant.name)
        part = variant.name in PARTS
        rows.append(_row(variant, case.simulate(variant), rows, before if part else None))
        before = variant.name if part else before
        yield rows[-1]


def _row(
    variant: SpeculationVariant,
    simulation: Simulation,
    rows: Sequence[SpeculationRow],
    before: str | None,
) -> SpeculationRow:
    """Return the row of a simulation. `rows`: those before it; the first three are the baselines of
    the others. `before`: name of the part before it."""
    times_s = {row.variant.name: row.step_s for row in rows}
    step_s = simulation.step.step_s
    speedups = [times_s.get(name, step_s) / step_s for name in (BASELINE, FAIR, COUPLED)]
    gain = times_s[before] / step_s if before else None
    return SpeculationRow(variant, simulation, *speedups, gain)


def variants(case: Case) -> list[SpeculationVariant]:
    """Return the baselines, veRL and fair veRL and coupled drafting first, the paper's parts, draft
    heads, even ends, and both."""
    plan, num = case.plan(), case.layout.num_engines
    apart = partial(_apart, plan)
    decoupled, reconfiguration, best_of_n = PARTS
    ahead = DraftSetting(SMALL, plan.window, coupled=False)
    policies = partial(case.policies, plan)
    whole = apart(best_of_n, drafting=ahead, policies=policies)
    heads = SpeculationVariant(HEADS, num, choose_drafting=case.head_drafting(), apart=True)
    return [
        SpeculationVariant(BASELINE, num),
        SpeculationVariant(FAIR, num, apart=True),
        SpeculationVariant(COUPLED, num, DraftSetting(SMALL, WINDOW)),
        SpeculationVariant(f"{BASELINE}, 2x GPUs", 2 * num),
        SpeculationVariant("n-gram", num, DraftSetting(NGRAM, WINDOW)),
        apart(DISAGGREGATED, drafting=DraftSetting(SMALL, WINDOW)),
        apart(decoupled, drafting=ahead),
        apart(reconfiguration, drafting=ahead, policies=partial(policies, race=False)),
        whole,
        heads,
        _ended(case, plan, whole, ENDS),
        _ended(case, plan, _with_races(case, heads, policies), TOGETHER),
    ]


def _apart(plan: GpuSplit, name: str, **how: Any) -> SpeculationVariant:
    """Return a variant with drafters on GPUs of their own."""
    shared_by = plan.engines_per_drafter
    return SpeculationVariant(name, plan.num_engines, engines_per_drafter=shared_by, **how)


def _with_races(
    case: Case, variant: SpeculationVariant, policies: Callable[[], tuple[Policy, ...]]
) -> SpeculationVariant:
    """Return the variant with draft models that race, on GPUs of their own."""
    num_engines = (case.num_gpus - RACE_GPUS) // case.layout.tp_degree
    return replace(
        variant,
        num_engines=num_engines,
        engines_per_drafter=-(-num_engines // RACE_GPUS),
        policies=policies,
        apart=False,
    )


def _ended(
    case: Case, plan: GpuSplit, variant: SpeculationVariant, name: str
) -> SpeculationVariant:
    """Return the variant with prompts placed so that engines end together."""

    def step_s(batch: int) -> float:
        context_tokens = batch * CONTEXT_TOKENS
        return case.latency.verify_s(case.layout.tp_degree, batch, context_tokens, plan.window)

    placement = partial(
        end_together,
        step_requests=step_requests_of(step_s, len(case.rows) // variant.num_engines),
        group_size=len(case.rows) // len(case.prompt_keys),
        max_num_seqs=len(case.rows),
    )
    return replace(variant, name=name, placement=placement)
