"""Settings of the policy-gradient loss.

`type` names a published algorithm and picks its vetted settings; every other field may be given
too and then overrides the one picked, so a dumped config holds the effective values.
"""

from typing import Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, model_validator

from schemas.base import Frozen

AlgorithmType = Literal["grpo", "dapo", "dr_grpo", "gspo"]

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
}
"""Settings of each algorithm that differ from the fields' defaults, which are GRPO's."""

PIPELINED_TIS_CAP = 2.0


def _leave_open(schema: dict[str, Any]) -> None:
    """A form sends every default that the schema names: none of what the type or the mode picks."""
    for name in set().union(*SETTINGS.values()):
        field = schema["properties"][name]
        del field["default"]
        if field.get("type") == "boolean":
            # A switch would show what nobody has chosen as off.
            del field["type"]
            field["enum"] = [True, False]


class AlgorithmConfig(Frozen):
    """Advantages within groups and a clipped policy gradient, as one of four papers has them.

    `grpo`: DeepSeekMath, arXiv:2402.03300, section 4.1, with its loss averaged over tokens.
    `dapo`: arXiv:2503.14476, section 3. A deviation: the overlong punishment is off until
    `overlong_buffer_tokens` is given, as its length depends on the task.
    `dr_grpo`: arXiv:2503.20783, section 3.2.
    `gspo`: arXiv:2507.18071, section 4.1, clipped as in section 5.1. A deviation: the ratio starts
    at exactly 1 and `tis_cap` takes up the difference between trainer and engine, which alone
    could exceed so narrow a clip.
    """

    model_config = ConfigDict(json_schema_extra=_leave_open)

    type: AlgorithmType = "grpo"
    """Picks the settings below. One that is given, not left empty, holds whatever the type."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio is clipped at 1 - clip_low. GSPO: 3e-4, others: 0.2."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped at 1 + clip_high. DAPO: 0.28, GSPO: 4e-4, others: 0.2."""
    importance_ratio: Literal["token", "sequence"] = "token"
    """Ratio to the old policy of each token, or the geometric mean over its response (GSPO)."""
    normalise_by_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards. Dr. GRPO: false,
    others: true."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """Mean over all tokens of the batch (GRPO, DAPO), mean over responses of their token means
    (GSPO), or sum over tokens / (responses * data.max_response_tokens) (Dr. GRPO)."""
    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL penalty to the starting policy; 0 keeps no reference model."""
    dynamic_sampling: bool = False
    """Leave out groups whose rewards are all equal: they count in no mean. DAPO: true, others:
    false."""
    overlong_filtering: bool = False
    """Leave responses that were cut at `data.max_response_tokens` out of the loss and of its means.
    Their rewards stay in the mean of their group."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """A response that ends within this many tokens of the limit is punished for its length, the
    more the later it ends; 0 punishes none."""
    overlong_penalty: PositiveFloat = 1.0
    """Reward taken from a response that reaches the limit."""
    tis_cap: PositiveFloat | None = None
    """Truncated importance sampling: largest weight pi_old / pi_inference of a token, where pi_old
    is the trainer's policy before the step. None takes pi_inference for pi_old.
    Default: 2.0 for GSPO and in a pipelined run, None otherwise."""

    @model_validator(mode="before")
    @classmethod
    def _pick_settings(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return SETTINGS.get(str(given.get("type", "grpo")), {}) | given

    def with_tis(self) -> "AlgorithmConfig":
        """These settings with the cap of a pipelined run, unless one (or None) was given."""
        if "tis_cap" in self.model_fields_set:
            return self
        return self.model_copy(update={"tis_cap": PIPELINED_TIS_CAP})
