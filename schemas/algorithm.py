"""Settings of the policy-gradient loss.

`type` names a published algorithm and picks its settings. Every other field that you give overrides
the one that `type` picked, so a dumped config holds the effective values.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from refrain.schemas.base import Frozen
from refrain.schemas.teacher import TeacherServerConfig, teaching_conflicts

AlgorithmType = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "cispo",
    "sapo",
    "gmpo",
    "dppo",
    "maxrl",
    "reinforce",
    "opo",
    "icepop",
    "areal",
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
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"loss_aggregation": "sequence_mean"},
    "gmpo": {"clip_low": 0.3297, "clip_high": 0.4918, "loss_aggregation": "sequence_mean"},
    "dppo": {"scale_rewards": "none", "loss_aggregation": "fixed_length"},
    "maxrl": {"scale_rewards": "mean", "loss_aggregation": "fixed_length"},
    "reinforce": {"scale_rewards": "none", "loss_aggregation": "fixed_length"},
    "opo": {"scale_rewards": "none", "loss_aggregation": "fixed_length"},
    "icepop": {
        "loss_aggregation": "sequence_mean",
        "tis_cap": 5.0,
        "tis_floor": 0.5,
        "tis_mode": "token_mask",
    },
    "areal": {
        "scale_rewards": "batch",
        "tis_cap": 5.0,
        "tis_floor": 0.0,
        "tis_mode": "token_mask",
    },
}
"""Settings of each algorithm that differ from the fields' defaults, which are GRPO's."""

BASELINES = {
    "rloo": "leave_one_out",
    "reinforce_plus_plus": "none",
    "opo": "length_weighted",
    "areal": "none",
}
LOSSES = {
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "gmpo": "gmpo",
    "dppo": "dppo",
    "reinforce": "reinforce",
    "opo": "reinforce",
}

MINIBATCHES = {"gspo": 4, "cispo": 16, "sapo": 4, "gmpo": 8, "dppo": 8, "icepop": 4, "areal": 4}
"""Updates per step of the algorithms that need more than one: with a single update GSPO has no
ratio to clip. `trainer.minibatches_per_step` overrides it."""

LARGEST_STALENESS = 2
"""With more and no `tis_cap`, GRPO lost over 0.02 of held-out reward (`refrain bench learning`)."""

ONLY_FOR = {
    "clip_low": ("clipped", "gspo", "cispo", "gmpo"),
    "clip_high": ("clipped", "gspo", "cispo", "gmpo"),
    "dual_clip": ("clipped", "gspo"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "divergence": ("dppo",),
    "max_divergence": ("dppo",),
}
"""Policy losses that read these settings. Others read none of them."""


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

    docs/algorithms.md has the formulas, docs/algorithm_types.md every deviation.

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

    `cispo`: arXiv:2506.13585. `sapo`: arXiv:2511.20347. `gmpo`: arXiv:2507.20673. `dppo`:
    arXiv:2602.04879. `maxrl`: arXiv:2602.02710. `opo`: arXiv:2505.23585. `icepop`:
    arXiv:2510.18855. `areal`: arXiv:2505.24298. `reinforce`: the plain policy gradient with the
    group's mean as baseline, as in Dr. GRPO, arXiv:2503.20783.
    """

    model_config = ConfigDict(json_schema_extra=_leave_open)

    type: AlgorithmType = "grpo"
    """Algorithm, which picks the settings below (docs/algorithms.md). For example, `dapo` if many
    groups have equal rewards. A setting that you give yourself overrides it; one that you leave
    empty does not."""
    clip_low: float = Field(default=0.2, gt=0.0, le=1.0)
    """The ratio is clipped at 1 - clip_low. For example, `0.1`: at 0.9. 1 is no lower bound. Lower
    it for smaller updates. GSPO: 3e-4, CISPO: 1, GMPO: 0.3297, others: 0.2."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped at 1 + clip_high. For example, `0.28`: at 1.28, as in DAPO. Raise it if
    the entropy falls too fast (`actor/entropy`). DAPO: 0.28, GSPO: 4e-4, CISPO: 4, GMPO: 0.4918,
    others: 0.2."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Largest loss of a token with a negative advantage, as a multiple of the advantage. For
    example, `3` as in veRL. A token beyond it has no gradient. Set it if large ratios upset
    training (`actor/ratio_max`). Default: no bound."""
    tau_pos: PositiveFloat = 1.0
    """SAPO's temperature for tokens of positive advantage. For example, `2.0`: their gradient
    falls twice as fast with the ratio's distance from 1. Raise it for smaller updates."""
    tau_neg: PositiveFloat = 1.05
    """SAPO's temperature for other tokens. For example, `1.2`. Leave it above `tau_pos`: a token
    that becomes less likely raises many others, which is less stable."""
    divergence: Literal["tv", "kl"] = "tv"
    """DPPO's divergence of the token's probabilities. `tv`: their difference. `kl`: the KL
    divergence of taking this token or another. For example, `kl` with a `max_divergence` of 0.05,
    which bounds rare tokens more."""
    max_divergence: PositiveFloat = 0.15
    """Divergence at which DPPO stops a token's gradient. For example, `0.05` for `kl`. Lower it for
    smaller updates."""
    scale_rewards: Literal["group", "batch", "mean", "none"] = "group"
    """Divisor of the advantages. `group`: standard deviation of the rewards of the group. `batch`:
    standard deviation of the advantages of all tokens of the step, after their mean is subtracted.
    `mean`: mean reward of the group, so that right answers to hard prompts count more (MaxRL).
    Choose `none` if groups whose rewards hardly differ weigh too much. Dr. GRPO, RLOO, DPPO,
    REINFORCE, OPO: none, REINFORCE++, AReaL: batch, MaxRL: mean, others: group."""
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
    reward_kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of a KL penalty that is part of the rewards: this times the sum of log pi - log pi_ref
    (k1) over a response is subtracted from its reward. For example, `0.001`. Set it in place of
    `kl_coefficient` to repeat runs that penalise rewards, such as RLOO's. It costs a pass of the
    reference model. 0: none."""
    teacher: Path | None = None
    """Hugging Face directory of a teacher with the policy's tokens, for example `/models/Qwen3-8B`.
    Each token's advantage is then log pi_teacher - log pi, on the policy's own responses (on-policy
    distillation). Set it if a better model exists: it teaches every token, where a reward teaches a
    response. The trainer holds it beside the policy, and it costs a forward pass. Default: none."""
    teacher_server: TeacherServerConfig | None = None
    """Teacher that a server holds, in place of `teacher`. For example, `{urls:
    http://host:8000/v1, model: Qwen/Qwen3-32B}`. Set it for a teacher that is too large for the
    trainer's GPUs. It needs `rollout.temperature` 1: servers score tokens at that temperature.
    Default: none."""
    reward_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the rewards' advantages beside a teacher, for example `1.0`. Raise it to get better
    than the teacher. 0 learns from the teacher alone; rewards are then only shown. Without a
    `teacher` it has no effect."""
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
    updates, or with a `staleness` above 2. GSPO: 2.0, IcePop and AReaL: 5.0, others: none."""
    tis_floor: float | None = Field(default=None, ge=0.0)
    """Lowest ratio that the `..._mask` modes accept. For example, `0.5` with a `tis_cap` of 5 is
    IcePop's mask. Lower it if too many tokens are rejected (`actor/tis_truncated`); 0 rejects only
    above tis_cap. IcePop: 0.5, AReaL: 0. Default: 1 / tis_cap."""
    tis_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "token_truncate"
    """Weight of a token in truncated importance sampling. `token`: its own ratio. `sequence`: the
    product over its response, which has less bias and more noise. `truncate`: at most tis_cap.
    `mask`: 0 if it is above tis_cap or below tis_floor, so the token or response has no part in the
    policy loss. `geometric_mask`: 0 for a response whose geometric mean of ratios is outside these,
    otherwise 1; for example, with a `tis_cap` of 1.001. Choose `token_mask` if tokens that engine
    and trainer disagree on upset training. IcePop, AReaL: token_mask, others: token_truncate."""
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

    @model_validator(mode="after")
    def _act_together(self) -> "AlgorithmConfig":
        """Refuse settings that cannot act beside the others."""
        for name, losses in ONLY_FOR.items():
            default = type(self).model_fields[name].default
            if self.policy_loss not in losses and getattr(self, name) != default:
                users = [kind for kind in get_args(AlgorithmType) if _loss_of(kind) in losses]
                raise ValueError(
                    f"algorithm.{name} does nothing with algorithm.type={self.type}: leave it out, "
                    f"or set a type that reads it ({', '.join(users)})"
                )
        for is_wrong, message in (*_conflicts(self), *teaching_conflicts(self)):
            if is_wrong:
                raise ValueError(message)
        return self

    @property
    def policy_loss(self) -> str:
        """Name of the loss of a token (`engines.learn.objective.OBJECTIVES`)."""
        return _loss_of(self.type)

    @property
    def baseline(self) -> str:
        """Baseline that is subtracted from a reward. `group_mean`: the mean of its group.
        `leave_one_out`: the mean of the others of its group (RLOO). `length_weighted`: the mean of
        its group, weighted by length (OPO). `none`: 0 (REINFORCE++)."""
        return BASELINES.get(self.type, "group_mean")

    @property
    def needs_reference(self) -> bool:
        """Whether the trainer holds the starting policy or a teacher beside the policy."""
        return self.penalises_kl or self.teacher is not None

    @property
    def scores_tokens(self) -> bool:
        """Whether each pass of the loss runs that model. Rewards run it before."""
        return self.kl_coefficient > 0.0 or self.teacher is not None

    @property
    def penalises_kl(self) -> bool:
        """Whether the loss or the rewards have a KL penalty to the starting policy."""
        return self.kl_coefficient > 0.0 or self.reward_kl_coefficient > 0.0

    @property
    def is_taught(self) -> bool:
        """Whether tokens are learnt from a teacher, in the trainer or on a server."""
        return self.teacher is not None or self.teacher_server is not None

    @property
    def refills(self) -> bool:
        """Whether a step draws other prompts in place of groups that are left out."""
        return self.dynamic_sampling and self.max_num_gen_batches > 1

    def check_rollouts(self, *, staleness: int, defers: bool, temperature: float) -> None:
        """Check the settings against the rollouts that a run makes.

        Raise ValueError if tokens are too stale for the loss. Raise it if rewards need whole groups
        and a step may defer samples, or if a served teacher cannot score at this temperature.
        """
        clips = self.policy_loss == "clipped" and self.tis_cap is None and self.file is None
        if clips and staleness > LARGEST_STALENESS:
            raise ValueError(
                f"staleness={staleness}: the clip is around the engine's policy, and drops tokens "
                f"on which {staleness} versions differ. On the demo, reward then rises less. Set "
                f"algorithm.tis_cap=2, algorithm.type=areal, or a staleness of at most "
                f"{LARGEST_STALENESS}"
            )
        if defers and self.reward_kl_coefficient > 0.0:
            raise ValueError(
                "algorithm.reward_kl_coefficient needs whole groups, and with staleness a step may "
                "leave samples to the next one: set staleness=0, or algorithm.kl_coefficient "
                "instead"
            )
        if self.teacher_server and temperature != 1.0:
            raise ValueError(
                f"algorithm.teacher_server: servers score tokens at temperature 1, and "
                f"rollout.temperature is {temperature:g}: set it to 1, or algorithm.teacher to the "
                "directory of a model, which the trainer scores at any temperature"
            )


def _loss_of(kind: str) -> str:
    return LOSSES.get(kind, "clipped")


def _conflicts(algorithm: AlgorithmConfig) -> Iterator[tuple[bool, str]]:
    """Yield whether settings contradict each other, and what to do then."""
    cap, floor, by_mean = algorithm.tis_cap, algorithm.tis_floor, algorithm.scale_rewards == "mean"
    yield (
        algorithm.policy_loss == "dppo" and cap is not None,
        "algorithm.tis_cap: dppo measures how far the policy is from the engine's, and with "
        "tis_cap the ratio is to the trainer's old policy: leave tis_cap out, or set another type",
    )
    yield (
        floor is not None and (cap is None or algorithm.tis_mode.endswith("truncate")),
        "algorithm.tis_floor: only the masks have a lower bound: set tis_cap and a tis_mode that "
        "ends in mask, for example token_mask, or leave tis_floor out",
    )
    yield (
        floor is not None and cap is not None and floor >= cap,
        f"algorithm.tis_floor ({floor}) is not below tis_cap ({cap}): every token would be "
        "rejected; lower the first or raise the second",
    )
    yield (
        algorithm.tis_mode.endswith("mask") and cap is not None and floor is None and cap <= 1.0,
        f"algorithm.tis_cap ({cap}) is not above 1, and a mask accepts ratios from 1 / tis_cap: "
        "raise tis_cap, or set tis_floor below it",
    )
    yield (
        by_mean and algorithm.overlong_buffer_tokens + algorithm.reward_kl_coefficient > 0,
        "algorithm.scale_rewards is mean, and overlong_buffer_tokens and reward_kl_coefficient "
        "make rewards negative: set both to 0, or another scale_rewards",
    )
    yield (
        by_mean and algorithm.baseline != "group_mean",
        f"algorithm.scale_rewards is mean, and algorithm.type={algorithm.type} has another "
        "baseline than the group's mean: set another scale_rewards or type, for example maxrl",
    )
    yield (
        algorithm.baseline == "length_weighted"
        and (algorithm.scale_rewards == "group" or algorithm.reward_kl_coefficient > 0.0),
        "algorithm.type=opo has no deviation of the group and no KL in its rewards: set "
        "scale_rewards=none and reward_kl_coefficient=0, or another type",
    )
