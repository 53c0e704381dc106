"""Values that travel between the tasks of one RL step: small models and keys, never token arrays.

The rollouts themselves are rows in the run's DuckDB store, found by (split, step).
"""

from pydantic import NonNegativeFloat, NonNegativeInt

from schemas.base import Frozen
from schemas.counts import (
    DraftingCounts,
    LibraryCounts,
    MoveCounts,
    StreamCounts,
    SwitchCounts,
)
from schemas.rollout import DraftSetting, Split
from schemas.weights import PolicyWeights


class HistoryReport(Frozen):
    """State of the history of earlier rollouts when a step is planned."""

    num_prompts: NonNegativeInt
    """Distinct training prompts with at least one finished rollout."""
    num_rollouts: NonNegativeInt
    num_tokens: NonNegativeInt
    """Response tokens of those rollouts."""
    num_indexed: NonNegativeInt = 0
    """Prompts of this step that have an index to draft from."""
    indexes: LibraryCounts = LibraryCounts()
    wait_s: NonNegativeFloat = 0.0
    """Seconds that the step waited for its indexes."""


class PromptGroup(Frozen):
    """The samples of one prompt, kept on one engine so that they share their prefix."""

    prompt_key: str
    engine: NonNegativeInt
    expected_tokens: NonNegativeFloat | None
    """Median response length of this prompt in its last epoch; None when it was never seen."""
    expected_passes: NonNegativeFloat | None = None
    """Forward passes that a response of that length is expected to take, drafts included; None when
    the prompt was never seen."""
    ranking_group: NonNegativeInt | None = None
    """Place in `StepPlan.ranking_groups`; None where prompts are not ranked."""


class RankingGroup(Frozen):
    """Prompts whose responses are expected to take about the same number of forward passes: without
    drafts, of about the same length (RhymeRL, section 6.2)."""

    engines: tuple[NonNegativeInt, ...]
    """Engines that it is spread over."""
    num_prompts: NonNegativeInt
    representative_tokens: NonNegativeFloat
    """Mean over its prompts of their expected lengths."""
    representative_passes: NonNegativeFloat | None = None
    """Mean over its prompts of the forward passes that a response is expected to take."""
    longest_tokens: NonNegativeInt
    """Longest response of its prompts in their last epoch."""


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
    """Prompts at the end of `groups` that were drawn in place of those that teach nothing."""
    ranking_groups: tuple[RankingGroup, ...] = ()
    """Ranking groups from the shortest responses to the longest, in forward passes; none where
    prompts are not ranked."""
    expected_s: NonNegativeFloat | None = None
    """Seconds until the last engine ends, as its responses are expected to be; None where prompts
    are not placed by that (`engines.histopipe.placement.deal_for_ends`)."""
    equal_s: NonNegativeFloat | None = None
    """The same with equal passes on every engine, which is how they are where it is no more."""
    length_growth: NonNegativeFloat | None = None
    """How much longer than the longest of its ranking group a response may become before it counts
    as an outlier (alpha of RhymeRL, section 6.3)."""
    drafting: DraftSetting | None = None
    """How its requests begin to be drafted for; None: from history, where that is on."""
    trials: dict[str, int] = {}
    """Requests that begin with another drafter, by its name, to see how good it is now."""

    @property
    def tokens_per_pass(self) -> dict[str, float]:
        """Tokens that a forward pass is expected to gain, by prompt, where it was seen before."""
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
        """This plan with the prompts of a further batch."""
        return self.model_copy(
            update={
                "groups": self.groups + batch.groups,
                "num_refills": self.num_refills + len(batch.groups),
            }
        )


class RolloutOutcome(Frozen):
    """Samples of a rolled-out step that its plan alone does not tell."""

    carried: tuple[SampleName, ...] = ()
    """Samples left to this step by the one before."""
    deferred: tuple[SampleName, ...] = ()
    """Samples left by this step to the next one."""

    def samples(self, plan: StepPlan) -> set[SampleName]:
        """Everything that the step trains on."""
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
    """Seconds with nothing to do, of the batch's `generation_s`."""
    num_restarts: NonNegativeInt = 0
    gone: bool = False
    """Whether it died meanwhile, and the cluster has no place for it any more."""
    drafting: DraftingCounts = DraftingCounts()

    @property
    def rest_s(self) -> float | None:
        """Seconds of its busy time for prefill and what else is no decoding; None where it is not
        measured."""
        passes_s = self.drafting.decode_s + self.drafting.verify_s
        return max(0.0, self.busy_s - self.drafting.draft_s - passes_s) if passes_s else None


class RolloutBatch(Frozen):
    """A finished generation stage. Its rows are durable."""

    split: Split
    step: NonNegativeInt
    policy_version: NonNegativeInt
    num_rollouts: NonNegativeInt
    num_refills: NonNegativeInt = 0
    """Prompts that were drawn in place of those that teach nothing."""
    num_tokens: NonNegativeInt
    mean_response_tokens: NonNegativeFloat
    max_response_tokens: NonNegativeInt
    clip_ratio: NonNegativeFloat
    """Share of responses cut at the limit."""
    num_draft_tokens: NonNegativeInt
    num_accepted_tokens: NonNegativeInt
    num_verifications: NonNegativeInt = 0
    """Forward passes of a request that verified at least one draft token."""
    moves: MoveCounts = MoveCounts()
    switches: SwitchCounts = SwitchCounts()
    """The run's last ones, to the end of this stage."""
    generation_s: NonNegativeFloat
    """Seconds to the last rollout from when the first engine began, or the phase before had ended
    if that was later."""
    bubble_share: NonNegativeFloat = 0.0
    """Share of the engines' time since the phase before ended in which they had nothing to do: they
    waited for training, or for each other."""
    sync_s: NonNegativeFloat
    """Longest weight sync of an engine, canary included."""
    canary_error: NonNegativeFloat | None
    """Largest mean |trainer - engine| log-probability over the engines; None without a sync."""
    shares: tuple[EngineShare, ...]
    drafted: dict[str, StreamCounts] = {}
    """Counts of each draft model's processes."""

    @property
    def speculation(self) -> tuple[float, int]:
        """Tokens that a request gains in a forward pass, and drafts that the pass verifies, both
        in the mean."""
        num_passes = self.num_tokens - self.num_accepted_tokens
        if not num_passes:
            return 1.0, 0
        return self.num_tokens / num_passes, round(self.num_draft_tokens / num_passes)

    @property
    def idle_share(self) -> float:
        """Share of the engines' time while the phase went on in which they had nothing to do."""
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
    """Means of the numbers that scorers gave beside the score, by name; each over the responses
    that have it."""
    num_retried: NonNegativeInt = 0
    """Responses that were scored again after a failure (`reward.on_error`)."""
    num_unscored: NonNegativeInt = 0
    """Responses whose reward is 0 because no score came."""
    reward_s: NonNegativeFloat


class TrainReport(Frozen):
    """One training phase: the policy moved from `policy_version - 1` to `policy_version`."""

    step: NonNegativeInt
    policy_version: NonNegativeInt
    num_tokens: NonNegativeInt
    """Response tokens trained on."""
    metrics: dict[str, float]
    """Loss, clip fraction, entropy, gradient norm ..., under the field's names (`actor/...`)."""
    train_s: NonNegativeFloat
    weights: PolicyWeights
    """Weights of the new version, for the engines."""


class StepReport(Frozen):
    """One finished RL step, as written to the store and to MLflow."""

    step: NonNegativeInt
    """Steps count from 1; step n trains policy version n - 1 into version n."""
    epoch: NonNegativeInt
    reward_mean: float
    metrics: dict[str, float]
    """Everything plotted per step, under the names veRL users know."""
    timing_s: dict[str, float]
    """Wall seconds by phase: history, plan, sync, rollout, reward, train, checkpoint, step."""
    reported_s: NonNegativeFloat = 0.0
    """Unix time."""
    drawn: bool = False
    """Its pictures are drawn, and what was saved is known."""


class RunSummary(Frozen):
    """Summary of a finished run (`summary.json`)."""

    steps: NonNegativeInt
    num_rollouts: NonNegativeInt
    reward_first: float
    """Mean training reward of the first epoch."""
    reward_last: float
    """Mean training reward of the last epoch."""
    acceptance_rate_by_epoch: tuple[float | None, ...] = ()
    """Accepted over drafted tokens; None for an epoch without drafts."""
    speculation_rate_by_epoch: tuple[float, ...] = ()
    """Share of the response tokens that came from drafts."""
    validation_first: float | None
    validation_last: float | None
    validation_best: float | None = None
    tokens_per_second: NonNegativeFloat
    """Response tokens over the seconds spent generating."""
    wall_s: NonNegativeFloat
    timing_s: dict[str, float]
    """Seconds by phase, added up over the steps."""
    missing: tuple[str, ...] = ()
    """Records that MLflow, Prefect and a copy's place did not take before the run ended, and where
    they are; sentences."""
    failures: dict[str, NonNegativeInt] = {}
    """Failures of the record by kind, in all processes of the run: `record.log` in its directory
    has each, and none ended it."""
