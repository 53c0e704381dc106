"""Settings and result of a simulation. Times are seconds of virtual time."""

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from refrain.schemas.base import Frozen

Mode = Literal["sync", "pipelined"]


class ClusterLayout(Frozen):
    """Equal engines on equal nodes. Raise ValueError for a layout that no cluster can have."""

    num_engines: PositiveInt
    tp_degree: PositiveInt = 1
    """GPUs of one engine. Tensor parallelism stays inside a node."""
    gpus_per_node: PositiveInt = 8
    num_gpus: PositiveInt | None = None
    """GPUs of the cluster. None: as many nodes as the engines need."""
    max_num_seqs: PositiveInt = 256
    """Requests that one engine decodes at the same time. The others wait."""
    max_context_tokens: PositiveInt | None = None
    """Tokens that the KV cache of one engine holds. None: no limit."""

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
    """Share of `step_s` in which an engine was idle and waited for the slowest, by engine."""
    one_left_shares: tuple[NonNegativeFloat, ...]
    """Share of `step_s` in which an engine had exactly one unfinished rollout, by engine."""
    last_alone_share: NonNegativeFloat
    """Share of `step_s` in which all engines together had exactly one unfinished rollout."""
    num_migrated: NonNegativeInt
    """Times that an unfinished rollout left an engine."""
    num_preempted: NonNegativeInt
    """Times that a rollout lost its KV cache because its engine's cache was full."""

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
    """Result of one policy set over the steps of a trace. Shares are weighted by seconds."""

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
        """Seconds of the first policy set / seconds of this one."""
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
    """One of several overlapping steps."""

    step: NonNegativeInt
    called_s: NonNegativeFloat
    """Time at which engines could begin it."""
    finished_s: NonNegativeFloat
    """Time at which its last rollout was finished or deferred."""
    num_planned: PositiveInt
    num_rollouts: PositiveInt
    """Samples that it trains on: the planned ones without those it deferred, and those deferred to
    it."""
    num_tokens: PositiveInt
    """Response tokens of these samples."""
    num_migrated: NonNegativeInt
    """Samples planned in this step that finished on another engine than planned."""
    num_deferred: NonNegativeInt
    """Samples deferred to the next step."""
    staleness: NonNegativeInt
    """Steps between the version that it trains and the oldest version that generated for it."""
    deferred_staleness: NonNegativeInt
    """The same for samples that were deferred to it."""
    mean_staleness: NonNegativeFloat
    """Mean staleness of its samples, including the deferred ones."""


class SimulatedPipeline(Frozen):
    """Consecutive steps on virtual engines."""

    configuration: str
    steps: tuple[PipelinedStep, ...]
    measured: tuple[NonNegativeInt, ...]
    """Steps of the steady state. If their number is even, as many are odd as even."""
    seconds: PositiveFloat
    """Seconds from the end of the step before the measured ones to the end of the last of them."""
    idle_shares: tuple[NonNegativeFloat, ...]
    """Share of `seconds` in which an engine was idle or waited for new weights, by engine."""

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
        """Steps between the trained version and the oldest version that generated for any
        sample."""
        return max(max(step.staleness, step.deferred_staleness) for step in self.of_window)

    @property
    def mean_staleness(self) -> float:
        """Mean over samples."""
        steps = self.of_window
        weights = [step.num_rollouts for step in steps]
        return fmean((step.mean_staleness for step in steps), weights=weights)

    @property
    def intra_share(self) -> float:
        """Share of the planned samples that moved to another engine within their step."""
        return self._share(sum(step.num_migrated for step in self.of_window))

    @property
    def inter_share(self) -> float:
        """Share of the planned samples that were deferred to the next step."""
        return self._share(sum(step.num_deferred for step in self.of_window))

    @property
    def migrated_share(self) -> float:
        """Share of the planned samples that moved or were deferred. A sample counts once: a
        deferred one is not in `intra_share`."""
        return self.intra_share + self.inter_share

    def _share(self, num: int) -> float:
        return num / sum(step.num_planned for step in self.of_window)


class Division(Frozen):
    """How a run divides its GPUs: engines and trainer take turns on all, or each has its own."""

    mode: Mode
    placement: Literal["shared", "split"]
    engine_gpus: PositiveInt
    trainer_gpus: PositiveInt
    """The engines' GPUs, if they are shared."""


class DividedRun(Frozen):
    """Consecutive steps on GPUs that are divided in this way."""

    policy_set: str
    division: Division
    num_gpus: PositiveInt
    """GPUs of the cluster."""
    num_steps: PositiveInt
    num_rollouts: PositiveInt
    seconds: PositiveFloat
    """Seconds from the trained policy of the step before these to that of the last of them."""
    rollout_s: NonNegativeFloat
    """Mean seconds of a generation stage."""
    train_s: NonNegativeFloat
    """Mean seconds of training, until the engines can load the weights."""
    idle_share: NonNegativeFloat
    """Share of all GPUs' seconds in which they neither generate nor train."""
    lacks: str = ""
    """Memory that is too small for this run; empty if it fits."""

    @property
    def step_s(self) -> float:
        return self.seconds / self.num_steps

    @property
    def between_s(self) -> float:
        """Seconds of a step in which GPUs or weights move between engines and trainer. 0 for a
        pipelined run, which does this beside its rollouts."""
        if self.division.mode == "pipelined":
            return 0.0
        return max(0.0, self.step_s - self.rollout_s - self.train_s)

    @property
    def samples_per_s(self) -> float:
        return self.num_rollouts / self.seconds
