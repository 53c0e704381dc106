"""A step in SpecActor's setting, and one way to roll it out.

The policies are those of a real run with the plan's settings. So races use the window that is the
fastest for a drafter's mean acceptance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from refrain.benchmarks.papers.drafters import (
    DRAFTERS,
    LARGE,
    LATENCY,
    OF_PAPER,
    SMALL,
    SpeculativeLatency,
    draw_acceptances,
)
from refrain.benchmarks.papers.generate import TraceSpec, generate
from refrain.benchmarks.papers.real_run import bare_plan, throttled
from refrain.engines.control.techniques import StepInputs, plan_policies, tokens_to_come
from refrain.engines.rollout.moves import Policy
from refrain.engines.simulate.batching import ChooseDrafting
from refrain.engines.simulate.cluster import (
    Placement,
    PolicySet,
    Simulation,
    even,
    simulate_step,
    step_requests,
)
from refrain.engines.simulate.lengths import TraceLengths
from refrain.engines.simulate.run_config import run_config
from refrain.engines.simulate.trace import Trace
from refrain.engines.specactor.ladder import Ladder
from refrain.engines.specactor.planner import Cluster, GpuSplit, split_gpus
from refrain.engines.specactor.reconfigure import near
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import HEAD
from refrain.schemas.rollout import DraftSetting, LengthHistory, RequestId
from refrain.schemas.simulate import ClusterLayout

MAX_WINDOW = 16
CONTEXT_TOKENS = 2048
"""Typical context of a request in plans: a prompt and half of a mean response."""
REPORT_S = 5.0
"""Seconds between two reports of an engine: some 300 tokens of each request."""


@dataclass(frozen=True, slots=True)
class SpeculationVariant:
    """One way to roll out the same requests."""

    name: str
    num_engines: int
    drafting: DraftSetting | None = None
    engines_per_drafter: int = 1
    policies: Callable[[], tuple[Policy, ...]] = tuple
    placement: Placement = even
    choose_drafting: ChooseDrafting | None = None
    """Chooses the draft setting of an engine by its batch, instead of `drafting`."""
    apart: bool = False
    """Whether samples are dealt one by one, and not with their prompt."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the paper does not print (`benchmarks.papers.drafters`); spread and launches over what
    is assumed."""

    spread: float = 1.0
    """Spread of the acceptance between requests and between drafters."""
    launches: float = 1.0
    """Seconds of launches of a drafter for each token."""
    head: float = DRAFTERS[HEAD].mean_acceptance
    """p of a draft head, for the median request."""


@dataclass(frozen=True, slots=True)
class Case:
    """The requests of a step, and how often each drafter is right."""

    rows: Trace
    layout: ClusterLayout
    """Layout of engines without drafter GPUs, on all GPUs."""
    acceptances: Mapping[RequestId, Mapping[str, float]]
    lengths: Mapping[str, LengthHistory]
    """Lengths of each prompt in the epoch before, if it was drawn there."""
    latency: SpeculativeLatency = LATENCY

    @classmethod
    def draw(
        cls,
        spec: TraceSpec,
        layout: ClusterLayout,
        step: int,
        seed: int,
        assumed: Assumptions = Assumptions(),
    ) -> "Case":
        epoch = spec.steps_per_epoch
        first = (step - 1) // epoch * epoch + 1
        before = range(max(1, first - epoch), first)
        rows = generate(spec, seed, [step])
        groups, ids = step_requests(rows, step)
        lengths = TraceLengths(generate(spec, seed, [*before, step])).before(step, groups)
        acceptances = draw_acceptances(ids, seed, assumed.spread, assumed.head)
        latency = replace(LATENCY, launches=assumed.launches)
        return cls(rows, layout, acceptances, lengths, latency)

    @property
    def num_gpus(self) -> int:
        return self.layout.num_engines * self.layout.tp_degree

    @property
    def prompt_keys(self) -> list[str]:
        return self.rows.table["prompt_key"].unique().to_pylist()

    def mean_acceptance(self, drafter: str) -> float:
        return fmean(of_request[drafter] for of_request in self.acceptances.values())

    def plan(self) -> GpuSplit:
        """Return the plan of Algorithm 1."""
        num, tp_degree = len(self.rows), self.layout.tp_degree
        cluster = Cluster(num, self.num_gpus, tp_degree, CONTEXT_TOKENS, num, num)
        p = self.mean_acceptance(SMALL)
        return split_gpus(cluster, self.latency, SMALL, p, max_window=MAX_WINDOW)

    def config(self, plan: GpuSplit, *, race: bool = True) -> TrainConfig:
        """Return the config of a real run with this plan."""
        specactor = {
            "draft_models": [{"name": name, "path": "of-the-paper"} for name in (SMALL, LARGE)],
            "drafter": SMALL,
            "window": plan.window,
            "race": race,
        }
        return run_config(
            int(self.rows.column("response_tokens").max()),
            rollout={"tp_degree": self.layout.tp_degree, "max_num_seqs": len(self.rows)},
            drafting={"enabled": False, "max_draft": MAX_WINDOW},
            specactor=specactor,
        )

    def inputs(self, plan: GpuSplit) -> StepInputs:
        """Return what a real run knows beforehand."""
        keys = self.prompt_keys
        drafting = DraftSetting(SMALL, plan.window, coupled=False)
        return StepInputs(
            plan=bare_plan(self.rows.steps[0], keys, len(self.rows) // len(keys), drafting),
            ladder=self.ladder(plan),
            acceptances={name: self.mean_acceptance(name) for name in OF_PAPER},
            to_come=tokens_to_come(self.config(plan), self.lengths),
        )

    def ladder(self, plan: GpuSplit) -> Ladder:
        """Return the ladder of a real run with this plan. N-grams are looked up in turn."""
        ahead = dict.fromkeys((SMALL, LARGE), plan.engines_per_drafter)
        shape = self.layout.tp_degree, OF_PAPER, CONTEXT_TOKENS, MAX_WINDOW
        return Ladder(self.latency, *shape, ahead)

    def head_drafting(self) -> ChooseDrafting:
        """Return the choice of an engine with a draft head: the best window for its batch."""
        shape = self.layout.tp_degree, (HEAD,), CONTEXT_TOKENS, MAX_WINDOW
        ladder, p = Ladder(self.latency, *shape), round(self.mean_acceptance(HEAD), 2)
        best, pace = cache(ladder.best_setting), cache(ladder.pace)

        def choose(batch: int, context_tokens: float) -> DraftSetting | None:
            at = p, near(batch), near(context_tokens / batch)
            setting = best(HEAD, *at)
            return (
                setting if pace(setting, *at).tokens_per_s > pace(None, *at).tokens_per_s else None
            )

        return choose

    def policies(self, plan: GpuSplit, *, race: bool = True) -> tuple[Policy, ...]:
        """Return the policies of a real run. Each decides for itself."""
        policies = plan_policies(self.config(plan, race=race), self.inputs(plan))
        return throttled(policies, REPORT_S)

    def simulate(self, variant: SpeculationVariant) -> Simulation:
        own = {"num_engines": variant.num_engines, "max_num_seqs": len(self.rows)}
        layout = self.layout.model_copy(update=own | {"num_gpus": None})
        policies = variant.policies()
        policy_set = PolicySet(
            name=variant.name,
            policies=policies,
            report_s=REPORT_S if policies else None,
            drafting=variant.drafting,
            placement=variant.placement,
            choose_drafting=variant.choose_drafting,
            apart=variant.apart,
        )
        latency = replace(self.latency, engines_per_drafter=variant.engines_per_drafter)
        medians = {key: of_prompt.median_tokens for key, of_prompt in self.lengths.items()}
        return simulate_step(self.rows, layout, latency, policy_set, medians, self.acceptances)
