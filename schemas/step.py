"""Values that travel between the tasks of one RL step: small models and keys, never token arrays.

The rollouts themselves are rows in the run's DuckDB store. Their key is (split, step).
"""

from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt, model_validator

from refrain.schemas.base import Frozen
from refrain.schemas.counts import (
    DraftingCounts,
    LibraryCounts,
    MoveCounts,
    StreamCounts,
    SwitchCounts,
)
from refrain.schemas.rollout import DraftSetting, Split
from refrain.schemas.weights import PolicyWeights


class HistoryReport(Frozen):
    """History of earlier rollouts when a step is planned."""

    num_prompts: NonNegativeInt
    """Distinct training prompts with at least one finished rollout."""
    num_rollouts: NonNegativeInt
    num_tokens: NonNegativeInt
    """Response tokens of those rollouts."""
    num_indexed: NonNegativeInt = 0
    """Prompts of this step that have an index."""
    indexes: LibraryCounts = LibraryCounts()
    wait_s: NonNegativeFloat = 0.0
    """Seconds that the step waited for its indexes."""


class PromptGroup(Frozen):
    """The samples of one prompt, on one engine so that they share their prefix."""

    prompt_key: str
    engine: NonNegativeInt
    expected_tokens: NonNegativeFloat | None
    """Median response length of this prompt in its last epoch. None for a new prompt."""
    expected_passes: NonNegativeFloat | None = None
    """Forward passes that a response of that length is expected to take, with drafts. None for a
    new prompt."""
    ranking_group: NonNegativeInt | None = None
    """Index in `StepPlan.ranking_groups`. None if prompts are not ranked."""
    source: str = ""
    """Source of the prompt in a mixture (`data.train`). Empty without a mixture."""


class RankingGroup(Frozen):
    """Prompts whose responses are expected to take about the same number of forward passes; without
    drafts, to have about the same length (RhymeRL, section 6.2)."""

    engines: tuple[NonNegativeInt, ...]
    """Engines that generate its responses."""
    num_prompts: NonNegativeInt
    representative_tokens: NonNegativeFloat
    """Mean expected length of its prompts."""
    representative_passes: NonNegativeFloat | None = None
    """Mean over its prompts of the forward passes that a response is expected to take."""
    longest_tokens: NonNegativeInt
    """Longest response to its prompts in their last epoch."""


class SampleName(Frozen):
    """A sample of a step, by its prompt."""

    prompt_key: str
    sample_index: int


class StepPlan(Frozen):
    """Plan of a step: which engine generates what, in which order."""

    split: Split
    step: NonNegativeInt
    epoch: NonNegativeInt
    policy_version: NonNegativeInt
    created_s: NonNegativeFloat
    """Unix time at which the step was planned."""
    group_size: NonNegativeInt
    groups: tuple[PromptGroup, ...]
    """Prompts in order of submission."""
    num_refills: NonNegativeInt = 0
    """Prompts at the end of `groups` that replace groups which were left out."""
    ranking_groups: tuple[RankingGroup, ...] = ()
    """Ranking groups from the fewest forward passes to the most. Empty if prompts are not
    ranked."""
    expected_s: NonNegativeFloat | None = None
    """Predicted seconds until the last engine ends. None if prompts are not placed by predicted
    ends (`engines.histopipe.placement.deal_for_ends`)."""
    equal_s: NonNegativeFloat | None = None
    """Predicted seconds with equal passes on every engine. Prompts are placed this way unless
    `expected_s` is less."""
    length_growth: NonNegativeFloat | None = None
    """A response is an outlier when it exceeds the longest of its ranking group by this factor
    (alpha in RhymeRL, section 6.3)."""
    drafting: DraftSetting | None = None
    """Draft setting of new requests. None: draft from history, if that is on."""
    trials: dict[str, int] = {}
    """Number of requests that begin with another drafter, to measure how good it is now; by
    drafter."""

    @property
    def tokens_per_pass(self) -> dict[str, float]:
        """Tokens that a forward pass is expected to gain, by prompt. New prompts are not
        included."""
        return {
            group.prompt_key: group.expected_tokens / group.expected_passes
            for group in self.groups
            if group.expected_tokens and group.expected_passes
        }

    @property
    def num_planned(self) -> int:
        """Samples that the plan draws."""
        return len(self.groups) * self.group_size

    def refilled(self, batch: "StepPlan") -> "StepPlan":
        """Return this plan with the prompts of a further batch."""
        return self.model_copy(
            update={
                "groups": self.groups + batch.groups,
                "num_refills": self.num_refills + len(batch.groups),
            }
        )


class RolloutOutcome(Frozen):
    """Samples that a rolled-out step received or deferred, as opposed to its plan."""

    carried: tuple[SampleName, ...] = ()
    """Samples that the step before deferred to this one."""
    deferred: tuple[SampleName, ...] = ()
    """Samples that this step deferred to the next one."""

    def samples(self, plan: StepPlan) -> set[SampleName]:
        """Return all samples that the step trains on."""
        planned = {
            SampleName(prompt_key=group.prompt_key, sample_index=i)
            for group in plan.groups
            for i in range(plan.group_size)
        }
        return (planned - set(self.deferred)) | set(self.carried)


class EngineShare(Frozen):
    """One engine's part in a generation stage."""

    engine: NonNegativeInt
    num_rollouts: NonNegativeInt
    num_tokens: NonNegativeInt
    busy_s: NonNegativeFloat
    """Seconds with unfinished requests of this stage."""
    idle_s: NonNegativeFloat = 0.0
    """Idle seconds within the batch's `generation_s`."""
    num_restarts: NonNegativeInt = 0
    gone: bool = False
    """Whether the engine died and the cluster has no place for a new one."""
    drafting: DraftingCounts = DraftingCounts()

    @property
    def rest_s(self) -> float | None:
        """Busy seconds that are not decoding, such as prefill. None if they were not measured."""
        passes_s = self.drafting.decode_s + self.drafting.verify_s
        return max(0.0, self.busy_s - self.drafting.draft_s - passes_s) if passes_s else None


class RolloutBatch(Frozen):
    """A finished generation stage. Its rows are durable."""

    split: Split
    step: NonNegativeInt
    policy_version: NonNegativeInt
    num_rollouts: NonNegativeInt
    num_refills: NonNegativeInt = 0
    """Prompts that replace groups which were left out."""
    num_tokens: NonNegativeInt
    mean_response_tokens: NonNegativeFloat
    max_response_tokens: NonNegativeInt
    clip_ratio: NonNegativeFloat
    """Share of responses cut at the limit."""
    num_failed: NonNegativeInt = 0
    """Conversations whose environment failed (`environment.on_error`)."""
    num_draft_tokens: NonNegativeInt
    num_accepted_tokens: NonNegativeInt
    num_verifications: NonNegativeInt = 0
    """Forward passes of a request that verified at least one draft token."""
    moves: MoveCounts = MoveCounts()
    switches: SwitchCounts = SwitchCounts()
    """The run's last switches, up to the end of this stage."""
    generation_s: NonNegativeFloat
    """Seconds until the last rollout. They count from when the first engine began or the phase
    before ended, whichever is later."""
    bubble_share: NonNegativeFloat = 0.0
    """Share of the engines' time since the end of the phase before in which they were idle: they
    waited for training or for each other."""
    sync_s: NonNegativeFloat
    """Longest weight sync of an engine, including the canary."""
    canary_error: NonNegativeFloat | None
    """Largest mean |trainer - engine| log-probability over the engines. None without a sync."""
    shares: tuple[EngineShare, ...]
    drafted: dict[str, StreamCounts] = {}
    """Counts of each draft model's processes."""
    conversations: dict[str, float] = {}
    """Metrics of conversations by name. Empty without an environment."""

    @property
    def speculation(self) -> tuple[float, int]:
        """Mean tokens that a request gains in a forward pass, and mean drafts that the pass
        verifies."""
        num_passes = self.num_tokens - self.num_accepted_tokens
        if not num_passes:
            return 1.0, 0
        return self.num_tokens / num_passes, round(self.num_draft_tokens / num_passes)

    @property
    def idle_share(self) -> float:
        """Share of the engines' time during the stage in which they were idle."""
        if not self.shares or self.generation_s == 0.0:
            return 0.0
        idle_s = sum(share.idle_s for share in self.shares)
        return idle_s / (len(self.shares) * self.generation_s)


class RewardedBatch(Frozen):
    """A scored generation stage. The scores are durable."""

    split: Split
    step: NonNegativeInt
    num_rollouts: NonNegativeInt
    reward_mean: float
    reward_std: NonNegativeFloat = 0.0
    """Over all rollouts."""
    reward_max: float
    reward_min: float
    best_of_group: float
    """Mean over prompts of the best sample (`best@n`)."""
    parts: dict[str, float] = {}
    """Mean of each further number that scorers returned, by name, over the responses that have
    it."""
    num_retried: NonNegativeInt = 0
    """Responses that were scored again after a failure (`reward.on_error`)."""
    num_unscored: NonNegativeInt = 0
    """Responses with reward 0 because they got no score. Responses without a reward
    (`environment.on_error`) count nowhere here, and all figures are 0 if all lack one."""
    reward_s: NonNegativeFloat


class TrainReport(Frozen):
    """One training phase, from `policy_version - 1` to `policy_version`."""

    step: NonNegativeInt
    policy_version: NonNegativeInt
    num_tokens: NonNegativeInt
    """Response tokens trained on."""
    metrics: dict[str, float]
    """Loss, clip fraction, entropy, gradient norm and so on, under the field's names
    (`actor/...`)."""
    train_s: NonNegativeFloat
    weights: PolicyWeights
    """Weights of the new version, for the engines."""


class StepReport(Frozen):
    """One finished RL step, as stored and as logged to MLflow."""

    step: NonNegativeInt
    """Steps count from 1. Step n trains policy version n - 1 into version n."""
    epoch: NonNegativeInt
    reward_mean: float
    metrics: dict[str, float]
    """All metrics of the step, under the names veRL users know."""
    timing_s: dict[str, float]
    """Wall seconds by phase: history, plan, sync, rollout, reward, train, checkpoint, step."""
    reported_s: NonNegativeFloat = 0.0
    """Unix time."""
    drawn: bool = False
    """Whether its pages are drawn and its savings known."""

    @model_validator(mode="before")
    @classmethod
    def _of_0_1(cls, values: Any) -> Any:
        """Leave out a field that only reports of refrain 0.1 have."""
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if name != "undrawn"}
        return values


class RunSummary(Frozen):
    """Summary of a finished run (`summary.json`)."""

    steps: NonNegativeInt
    num_rollouts: NonNegativeInt
    reward_first: float
    """Mean training reward of the first epoch."""
    reward_last: float
    """Mean training reward of the last epoch."""
    acceptance_rate_by_epoch: tuple[float | None, ...] = ()
    """Accepted / drafted tokens. None for an epoch without drafts."""
    speculation_rate_by_epoch: tuple[float, ...] = ()
    """Share of the response tokens that came from drafts."""
    validation_first: float | None
    validation_last: float | None
    validation_best: float | None = None
    tokens_per_second: NonNegativeFloat
    """Response tokens divided by the seconds spent generating."""
    wall_s: NonNegativeFloat
    timing_s: dict[str, float]
    """Seconds by phase, added up over the steps."""
    missing: tuple[str, ...] = ()
    """Records that MLflow, Prefect or the object store did not receive before the run ended, and
    where they are; sentences."""
    failures: dict[str, NonNegativeInt] = {}
    """Number of failed records by kind, in all processes of the run; they did not end it.
    `record.log` in the run's directory lists each."""
