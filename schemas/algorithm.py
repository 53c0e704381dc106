"""Settings of the policy-gradient loss.

`type` names a published algorithm and picks its vetted settings; every other field may be given
too and then overrides the one picked, so a dumped config holds the effective values.
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
    "dr_grpo": {"normalise_by_std": False, "loss_aggregation": "fixed_length"},
    "gspo": {
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "importance_ratio": "sequence",
        "loss_aggregation": "sequence_mean",
        "tis_cap": 2.0,
    },
    "rloo": {
        "baseline": "leave_one_out",
        "normalise_by_std": False,
        "loss_aggregation": "fixed_length",
    },
    "reinforce_plus_plus": {"baseline": "none", "std_over": "batch", "kl_estimator": "k2"},
    "reinforce_plus_plus_baseline": {"std_over": "batch", "kl_estimator": "k2"},
}
"""Settings of each algorithm that differ from the fields' defaults, which are GRPO's."""

MINIBATCHES = {"gspo": 4}
"""Updates of a step of each algorithm that needs more than one: with one there is no ratio for
GSPO to clip. `trainer.minibatches_per_step` overrides it."""


def _leave_open(schema: dict[str, Any]) -> None:
    """A form sends every default that the schema names: none of what the type picks."""
    for name in set().union(*SETTINGS.values()):
        field = schema["properties"][name]
        del field["default"]
        if field.get("type") == "boolean":
            # A switch would show what nobody has chosen as off.
            del field["type"]
            field["enum"] = [True, False]


class AlgorithmConfig(Frozen):
    """Advantages within groups and a clipped policy gradient, as a paper has them.

    docs/algorithms.md has the formulas and every deviation.

    `grpo`: DeepSeekMath, arXiv:2402.03300, section 4.1, with its loss averaged over tokens.
    `dapo`: arXiv:2503.14476, section 3. Deviations: the overlong punishment is off until
    `overlong_buffer_tokens` is given, as its length depends on the task, and is half a reward, as
    rewards are 0 and 1 here and -1 and 1 in the paper; groups are compared by any rewards. Others,
    of dynamic sampling: the prompts that a step draws in place of groups left out are other ones of
    the epoch, which keep their own place in its order, so that an epoch has as many steps whatever
    is left out (the paper draws on); all groups whose rewards differ are trained on, where the
    paper trains on as many as it wants and drops the rest; a step with too few when
    `max_num_gen_batches` (veRL's name, and 10 its recipe's value) are generated trains on those,
    where veRL's run fails.
    `dr_grpo`: arXiv:2503.20783, section 3.2.
    `gspo`: arXiv:2507.18071, section 4.1, clipped as in section 5.1, with its four minibatches. A
    deviation: `tis_cap` takes up the difference between trainer and engine, which alone could
    exceed so narrow a clip.
    `rloo`: REINFORCE leave-one-out, arXiv:2402.14740. A deviation: PPO's clip, which acts from the
    second update of a step on.
    `reinforce_plus_plus` and `_baseline`: arXiv:2501.03262, which normalises over the whole batch.
    A deviation: a KL penalty is a term of the loss, not of the reward.
    """

    model_config = ConfigDict(json_schema_extra=_leave_open)

    type: AlgorithmType = "grpo"
    """Picks the settings below. One that is given, not left empty, holds whatever the type."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio is clipped at 1 - clip_low. GSPO: 3e-4, others: 0.2."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped at 1 + clip_high. DAPO: 0.28, GSPO: 4e-4, others: 0.2."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Largest loss of a token with a negative advantage, as a multiple of the advantage: beyond it
    there is no gradient. Default: no bound. veRL has 3."""
    importance_ratio: Literal["token", "sequence"] = "token"
    """Ratio to the old policy of each token, or the geometric mean over its response (GSPO)."""
    baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    """Taken from a reward: the mean of its group, the mean of the others of its group (RLOO), or
    nothing (REINFORCE++)."""
    normalise_by_std: bool = True
    """Divide advantages by a standard deviation. Dr. GRPO and RLOO: false, others: true."""
    std_over: Literal["group", "batch"] = "group"
    """Standard deviation of the rewards of its group, or of the advantages of all tokens of the
    step, whose mean is taken off first (REINFORCE++)."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """Mean over all tokens of the batch (GRPO, DAPO), mean over responses of their token means
    (GSPO), or sum over tokens / (responses * data.max_response_tokens) (Dr. GRPO, RLOO)."""
    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL penalty to the starting policy; 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL divergence of a token, with d = log pi - log pi_ref: d, d^2 / 2 or
    exp(-d) + d - 1. The gradient of k2 is that of the KL divergence, that of k3 near it for a small
    d; k1 has none but noise. REINFORCE++: k2, others: k3."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy of each token's distribution, in nats, which is taken off the loss."""
    dynamic_sampling: bool = False
    """Leave out groups whose rewards are all equal, which count in no mean, and generate others in
    their place. DAPO: true, others: false."""
    max_num_gen_batches: PositiveInt = 10
    """Batches of prompts that a step with `dynamic_sampling` generates at most, its own the first,
    until it has `prompts_per_step` groups whose rewards differ; then it trains on those it has. 1
    draws no prompts in place of those that are left out."""
    overlong_filtering: bool = False
    """Leave responses that were cut at `data.max_response_tokens` out of the loss and of its means.
    Their rewards stay in the mean of their group."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """A response that ends within this many tokens of the limit is punished for its length, the
    more the later it ends; 0 punishes none."""
    overlong_penalty: PositiveFloat = 0.5
    """Reward taken from a response that reaches the limit: half of the distance between a wrong
    answer and a right one is DAPO's. With a scorer of -1 and 1 give 1."""
    tis_cap: PositiveFloat | None = None
    """Truncated importance sampling: largest weight pi_old / pi_inference of a token, where pi_old
    is the trainer's policy before the step. None takes pi_inference for pi_old.
    Default: 2.0 for GSPO, None otherwise."""
    tis_level: Literal["token", "sequence"] = "token"
    """The weight of a token is its own ratio, or the product over its response."""
    tis_reject: bool = False
    """A weight above tis_cap, or below 1 / tis_cap, becomes 0 instead of tis_cap: such tokens, or
    responses, take no part in the policy loss."""
    file: Path | None = None
    """A Python file that defines `compute_advantage(reward, group_rewards)`, `compute_loss(
    log_ratios, advantages, algorithm)` or both, in place of those above."""

    @model_validator(mode="before")
    @classmethod
    def _pick_settings(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return SETTINGS.get(str(given.get("type", "grpo")), {}) | given

    @property
    def refills(self) -> bool:
        """Whether a step draws prompts in place of those that teach nothing."""
        return self.dynamic_sampling and self.max_num_gen_batches > 1
