"""Settings of the policy-gradient loss.

`type` names a published algorithm and picks its settings. Every other field that you give overrides
the one that `type` picked, so a dumped config holds the effective values.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from schemas.base import Frozen

AlgorithmType = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"clip_high": 0.28, "dynamic_sampling": True},
    "dr_grpo": {"scale_rewards": "none", "loss_aggregation": "fixed_length"},
    "gspo": {
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "loss_aggregation": "sequence_mean",
        "tis_cap": 2.0,
    },
    "rloo": {"scale_rewards": "none", "loss_aggregation": "fixed_length"},
    "reinforce_plus_plus": {"scale_rewards": "batch", "kl_estimator": "k2"},
    "reinforce_plus_plus_baseline": {"scale_rewards": "batch", "kl_estimator": "k2"},
}
"""Settings of each algorithm that differ from the fields' defaults, which are GRPO's."""

BASELINES = {"rloo": "leave_one_out", "reinforce_plus_plus": "none"}
RATIOS = {"gspo": "sequence"}

MINIBATCHES = {"gspo": 4}
"""Updates per step of the algorithms that need more than one: with a single update GSPO has no
ratio to clip. `trainer.minibatches_per_step` overrides it."""


def _leave_open(schema: dict[str, Any]) -> None:
    """Remove the defaults that `type` picks from the JSON schema: a form sends every default it
    shows."""
    for name in set().union(*SETTINGS.values()):
        field = schema["properties"][name]
        del field["default"]
        if field.get("type") == "boolean":
            # A form would show a switch as off, although nobody has chosen that.
            del field["type"]
            field["enum"] = [True, False]


class AlgorithmConfig(Frozen):
    """Group-relative advantages and a clipped policy gradient, as in the algorithm's paper.

    docs/algorithms.md has the formulas and every deviation.

    `grpo`: DeepSeekMath, arXiv:2402.03300, section 4.1, with its loss averaged over tokens.

    `dapo`: arXiv:2503.14476, section 3. Deviations: the overlong penalty is off until you set
    `overlong_buffer_tokens`, as its length depends on the task. It is half a reward, as rewards are
    0 and 1 here and -1 and 1 in the paper. Groups are compared by any rewards. Deviations of
    dynamic sampling: a step replaces the groups it leaves out by other prompts of the epoch. These
    keep their own place in the epoch's order, so an epoch always has the same number of steps (the
    paper draws on). A step trains on all groups whose rewards differ; the paper trains on a fixed
    number and drops the rest. A step that has generated `max_num_gen_batches` batches (veRL's name;
    10 is its recipe's value) and has too few groups trains on those; veRL's run fails.

    `dr_grpo`: arXiv:2503.20783, section 3.2.

    `gspo`: arXiv:2507.18071, section 4.1, clipped as in section 5.1, with its four minibatches.
    Deviation: `tis_cap` corrects the difference between trainer and engine, which alone could
    exceed so narrow a clip.

    `rloo`: REINFORCE leave-one-out, arXiv:2402.14740. Deviation: PPO's clip, which has an effect
    from the second update of a step on.

    `reinforce_plus_plus` and `_baseline`: arXiv:2501.03262, which normalises over the whole batch.
    Deviation: the KL penalty is a term of the loss, not of the reward.
    """

    model_config = ConfigDict(json_schema_extra=_leave_open)

    type: AlgorithmType = "grpo"
    """Algorithm, which picks the settings below (docs/algorithms.md). For example, `dapo` if many
    groups have equal rewards. A setting that you give yourself overrides it; one that you leave
    empty does not."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio is clipped at 1 - clip_low. For example, `0.1`: at 0.9. Lower it for smaller
    updates. GSPO: 3e-4, others: 0.2."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped at 1 + clip_high. For example, `0.28`: at 1.28, as in DAPO. Raise it if
    the entropy falls too fast (`actor/entropy`). DAPO: 0.28, GSPO: 4e-4, others: 0.2."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Largest loss of a token with a negative advantage, as a multiple of the advantage. For
    example, `3` as in veRL. A token beyond it has no gradient. Set it if large ratios upset
    training (`actor/ratio_max`). Default: no bound."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation that advantages are divided by. `group`: of the rewards of the group.
    `batch`: of the advantages of all tokens of the step, after their mean is subtracted. Choose
    `none` if groups whose rewards hardly differ weigh too much. Dr. GRPO and RLOO: none,
    REINFORCE++: batch, others: group."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """`token_mean`: mean over all tokens of the batch (GRPO, DAPO). `sequence_mean`: mean over
    responses of their token means (GSPO), so that long ones weigh no more. `fixed_length`: sum over
    tokens / (responses * data.max_response_tokens) (Dr. GRPO, RLOO). Leave it to
    `algorithm.type`."""
    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL penalty to the starting policy, for example `0.001`. Raise it if the policy
    drifts too far from its start. 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of a token's KL divergence, with d = log pi - log pi_ref. `k1`: d, whose gradient is
    only noise. `k2`: d^2 / 2, whose gradient is that of the KL divergence. `k3`: exp(-d) + d - 1,
    whose gradient is close to it for a small d. Choose `k2` if the policy moves far. REINFORCE++:
    k2, others: k3."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of an entropy bonus: this times the entropy of each token's distribution, in nats, is
    subtracted from the loss. For example, `0.001`. Raise it if the entropy falls towards 0
    (`actor/entropy`)."""
    dynamic_sampling: bool = False
    """Leave out groups whose rewards are all equal, and generate other prompts in their place. Such
    groups count in no mean. Switch it on if there are many (`critic/zero_variance_share`). DAPO:
    true, others: false."""
    max_num_gen_batches: PositiveInt = 10
    """Batches of prompts that a step with `dynamic_sampling` generates at most, its own included,
    for example `3`. It stops once `prompts_per_step` groups have rewards that differ, and otherwise
    trains on those it has. Lower it if steps take too long. 1 draws no prompts in place of those
    that are left out."""
    overlong_filtering: bool = False
    """Leave responses that were cut at `data.max_response_tokens` out of the loss and its means.
    Their rewards stay in the mean of their group. Switch it on if good responses are cut."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Penalise a response that ends within this many tokens of the limit, the more the later it
    ends. For example, `4096` with a limit of 20480, as in DAPO. Raise it if responses grow to the
    limit. 0 penalises none."""
    overlong_penalty: PositiveFloat = 0.5
    """Reward subtracted from a response that reaches the limit. For example, `1` for rewards of -1
    and 1, as in DAPO: half the distance between a wrong answer and a right one. Change it with the
    range of your rewards."""
    tis_cap: PositiveFloat | None = None
    """Truncated importance sampling: the largest weight pi_old / pi_inference of a token, for
    example `2.0`. pi_old is the trainer's policy before the step, pi_inference the engine's; none
    uses pi_inference as pi_old. Set it if both differ much (`mismatch/k1`) and a step makes several
    updates. Default: 2.0 for GSPO, none otherwise."""
    tis_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )
    """Weight of a token in truncated importance sampling. `token`: its own ratio. `sequence`: the
    product over its response, which has less bias and more noise. `truncate`: at most tis_cap.
    `mask`: 0 if it is above tis_cap or below 1 / tis_cap, so the token or response has no part in
    the policy loss. Choose `token_mask` if tokens that engine and trainer disagree on upset
    training."""
    file: Path | None = None
    """Python file with your own `compute_advantage(reward, group_rewards)`, your own
    `compute_loss(log_ratios, advantages, algorithm)`, or both. For example, `mine.py`. Set it to
    try an algorithm that `type` does not name."""

    @model_validator(mode="before")
    @classmethod
    def _pick_settings(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return SETTINGS.get(str(given.get("type", "grpo")), {}) | given

    @property
    def importance_ratio(self) -> str:
        """Ratio to the old policy that is clipped. `token`: of each token. `sequence`: the
        geometric mean over the response (GSPO)."""
        return RATIOS.get(self.type, "token")

    @property
    def baseline(self) -> str:
        """Baseline that is subtracted from a reward. `group_mean`: the mean of its group.
        `leave_one_out`: the mean of the others of its group (RLOO). `none`: 0 (REINFORCE++)."""
        return BASELINES.get(self.type, "group_mean")

    @property
    def refills(self) -> bool:
        """Whether a step draws other prompts in place of groups that are left out."""
        return self.dynamic_sampling and self.max_num_gen_batches > 1
