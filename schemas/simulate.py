"""Setting and result of a simulation: small models, times in seconds of virtual time."""

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from schemas.base import Frozen

Mode = Literal["sync", "pipelined"]


class ClusterLayout(Frozen):
    """Equal engines on equal nodes. A layout that no cluster can have is a ValueError."""

    num_engines: PositiveInt
    tp_degree: PositiveInt = 1
    """GPUs of one engine; tensor parallelism stays inside a node."""
    gpus_per_node: PositiveInt = 8
    num_gpus: PositiveInt | None = None
    """GPUs there are; None takes as many nodes as the engines need."""
    max_num_seqs: PositiveInt = 256
    """Requests that one engine decodes at a time; the others wait."""
    max_context_tokens: PositiveInt | None = None
    """KV-cache capacity of one engine; None is without bound."""

    @model_validator(mode="after")
    def _fits(self) -> "ClusterLayout":
        if self.tp_degree > self.gpus_per_node:
            raise ValueError(
                f"TP {self.tp_degree} does not fit a node of {self.gpus_per_node} GPUs: "
                "lower the TP degree"
            )
        if self.num_gpus is None:
            return self
        nodes, rest = divmod(self.num_gpus, self.gpus_per_node)
        places = nodes * (self.gpus_per_node // self.tp_degree) + rest // self.tp_degree
        if self.num_engines > places:
            raise ValueError(
                f"{self.num_engines} engines of TP {self.tp_degree} do not fit {self.num_gpus} "
                f"GPUs in nodes of {self.gpus_per_node}: at most {places} do"
            )
        return self


class SimulatedStep(Frozen):
    """The generation stage of one step on virtual engines."""

    policy_set: str
    step: NonNegativeInt
    num_rollouts: PositiveInt
    num_tokens: PositiveInt
    """Response tokens."""
    step_s: NonNegativeFloat
    """Seconds from the first submission to the last finished rollout."""
    idle_shares: tuple[NonNegativeFloat, ...]
    """Share of `step_s` in which an engine had nothing to do and waited for the slowest, by
    engine."""
    one_left_shares: tuple[NonNegativeFloat, ...]
    """Share of `step_s` in which an engine had exactly one unfinished rollout, by engine."""
    last_alone_share: NonNegativeFloat
    """Share of `step_s` in which all engines together had exactly one unfinished rollout."""
    num_migrated: NonNegativeInt
    """Times that a rollout left an engine unfinished."""
    num_preempted: NonNegativeInt
    """Times that a rollout lost its KV cache because its engine's was full."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def idle_share(self) -> float:
        return fmean(self.idle_shares)

    @property
    def one_left_share(self) -> float:
        """Mean over engines."""
        return fmean(self.one_left_shares)


class PolicySetSummary(Frozen):
    """One policy set over the steps of a trace; shares are weighted by seconds."""

    policy_set: str
    steps: tuple[SimulatedStep, ...]
    first_s: NonNegativeFloat
    """Seconds that the first policy set took for these steps."""

    @property
    def seconds(self) -> float:
        return sum(step.step_s for step in self.steps)

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.steps)

    @property
    def tokens_per_s(self) -> float:
        return sum(step.num_tokens for step in self.steps) / self.seconds

    @property
    def speedup(self) -> float:
        """Seconds of the first policy set over seconds of this one."""
        return self.first_s / self.seconds

    @property
    def idle_share(self) -> float:
        return self._mean([step.idle_share for step in self.steps])

    @property
    def one_left_share(self) -> float:
        return self._mean([step.one_left_share for step in self.steps])

    @property
    def last_alone_share(self) -> float:
        return self._mean([step.last_alone_share for step in self.steps])

    @property
    def idle_shares(self) -> list[float]:
        """Idle shares by engine."""
        return [self._mean(own) for own in zip(*(s.idle_shares for s in self.steps), strict=True)]

    @property
    def num_migrated(self) -> int:
        return sum(step.num_migrated for step in self.steps)

    @property
    def num_preempted(self) -> int:
        return sum(step.num_preempted for step in self.steps)

    def _mean(self, shares: Sequence[float]) -> float:
        return fmean(shares, weights=[step.step_s for step in self.steps])


class PipelinedStep(Frozen):
    """One of several steps that overlap."""

    step: NonNegativeInt
    called_s: NonNegativeFloat
    """Time at which engines could begin it."""
    finished_s: NonNegativeFloat
    """Time at which its last rollout was there, or deferred."""
    num_planned: PositiveInt
    num_rollouts: PositiveInt
    """Samples that it trains on: those planned, without the deferred, with those deferred to it."""
    num_tokens: PositiveInt
    """Response tokens of these samples."""
    num_migrated: NonNegativeInt
    """Those of these samples that were planned here and finished on another engine than planned."""
    num_deferred: NonNegativeInt
    """Samples left to the next step."""
    staleness: NonNegativeInt
    """Steps between the version that it trains and the oldest one that generated for it."""
    deferred_staleness: NonNegativeInt
    """Steps between the version that it trains and the oldest one that generated for a sample
    deferred to it."""
    mean_staleness: NonNegativeFloat
    """Mean of that over its samples, the deferred ones included."""


class SimulatedPipeline(Frozen):
    """Consecutive steps on virtual engines."""

    configuration: str
    steps: tuple[PipelinedStep, ...]
    measured: tuple[NonNegativeInt, ...]
    """Steps of the steady state, an equal number of either parity where the number is even."""
    seconds: PositiveFloat
    """Seconds from the finish of the step before them to that of the last of them."""
    idle_shares: tuple[NonNegativeFloat, ...]
    """Share of `seconds` in which an engine had nothing to do or waited for weights to be trained,
    by engine."""

    @property
    def of_window(self) -> tuple[PipelinedStep, ...]:
        return tuple(step for step in self.steps if step.step in self.measured)

    @property
    def samples_per_s(self) -> float:
        return sum(step.num_rollouts for step in self.of_window) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return sum(step.num_tokens for step in self.of_window) / self.seconds

    @property
    def idle_share(self) -> float:
        return fmean(self.idle_shares)

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.of_window)

    @property
    def largest_staleness(self) -> int:
        """Steps between the version trained and the oldest that generated, of any sample."""
        return max(max(step.staleness, step.deferred_staleness) for step in self.of_window)

    @property
    def mean_staleness(self) -> float:
        """Mean over samples."""
        steps = self.of_window
        weights = [step.num_rollouts for step in steps]
        return fmean((step.mean_staleness for step in steps), weights=weights)

    @property
    def intra_share(self) -> float:
        """Share of the planned samples that went to another engine in their own step."""
        return self._share(sum(step.num_migrated for step in self.of_window))

    @property
    def inter_share(self) -> float:
        """Share of the planned samples that went to the next step."""
        return self._share(sum(step.num_deferred for step in self.of_window))

    @property
    def migrated_share(self) -> float:
        """Share of the planned samples that went elsewhere; each is counted once, so one that was
        deferred is not in the other share."""
        return self.intra_share + self.inter_share

    def _share(self, num: int) -> float:
        return num / sum(step.num_planned for step in self.of_window)


class Division(Frozen):
    """GPUs of a run: engines and trainer have all of them in turn, or each has its own."""

    mode: Mode
    placement: Literal["shared", "split"]
    engine_gpus: PositiveInt
    trainer_gpus: PositiveInt
    """Those of the engines, where they are shared."""


class DividedRun(Frozen):
    """Consecutive steps on GPUs that are divided so."""

    policy_set: str
    division: Division
    num_gpus: PositiveInt
    """GPUs there are."""
    num_steps: PositiveInt
    num_rollouts: PositiveInt
    seconds: PositiveFloat
    """Seconds from the trained policy of the step before them to that of the last of them."""
    rollout_s: NonNegativeFloat
    """Mean seconds of a generation stage."""
    train_s: NonNegativeFloat
    """Mean seconds of training, until the weights can be taken."""
    idle_share: NonNegativeFloat
    """Share of all GPUs' seconds in which they neither generate nor train."""
    lacks: str = ""
    """Memory that is too small for it; empty where it fits."""

    @property
    def step_s(self) -> float:
        return self.seconds / self.num_steps

    @property
    def between_s(self) -> float:
        """Seconds of a step in which GPUs change hands or weights their place. A pipelined run has
        these beside its rollouts."""
        if self.division.mode == "pipelined":
            return 0.0
        return max(0.0, self.step_s - self.rollout_s - self.train_s)

    @property
    def samples_per_s(self) -> float:
        return self.num_rollouts / self.seconds
