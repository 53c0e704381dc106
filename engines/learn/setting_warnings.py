"""Find settings of a run that have no effect or a harmful one, before the run starts. Pure."""

from collections.abc import Iterator

from refrain.schemas.algorithm import SETTINGS
from refrain.schemas.config import TrainConfig


def setting_warnings(config: TrainConfig) -> list[str]:
    """Return a sentence for each setting that never acts or that biases training."""
    return [*_inert_clip(config), *_unused(config), *_biased_ratio(config)]


def _inert_clip(config: TrainConfig) -> Iterator[str]:
    """With one update a step, the policy is its own old policy, so the ratio is exactly 1."""
    algorithm = config.algorithm
    num_updates = config.num_minibatches * config.trainer.passes_per_step
    clips = algorithm.policy_loss != "reinforce"
    if num_updates == 1 and algorithm.tis_cap is not None and clips:
        yield (
            f"the clip of algorithm.type {algorithm.type} never acts: with one update a step and "
            "algorithm.tis_cap set, the ratio to the old policy is always 1. To make the clip act, "
            "raise trainer.minibatches_per_step or trainer.passes_per_step"
        )


def _unused(config: TrainConfig) -> Iterator[str]:
    """Yield settings that are set but switched off by another setting."""
    algorithm, trainer = config.algorithm, config.trainer
    needs = (
        (algorithm, "kl_estimator", algorithm.kl_coefficient > 0, "algorithm.kl_coefficient is 0"),
        (algorithm, "tis_mode", algorithm.tis_cap is not None, "algorithm.tis_cap is not set"),
        (
            algorithm,
            "overlong_penalty",
            algorithm.overlong_buffer_tokens > 0,
            "algorithm.overlong_buffer_tokens is 0",
        ),
        (trainer, "decay_steps", trainer.decay != "constant", "trainer.decay is constant"),
        (trainer, "min_learning_rate", trainer.decay != "constant", "trainer.decay is constant"),
    )
    for section, name, acts, why in needs:
        default = type(section).model_fields[name].default
        picked = SETTINGS[algorithm.type].get(name)
        if not acts and getattr(section, name) not in (default, picked):
            home = "algorithm" if section is algorithm else "trainer"
            yield f"{home}.{name} never acts: {why}"


def _biased_ratio(config: TrainConfig) -> Iterator[str]:
    """Log-probabilities cover the whole distribution, but tokens are drawn from a part of it."""
    rollout = config.rollout
    if rollout.top_p < 1.0 or rollout.top_k > 0:
        yield (
            f"rollout.top_p = {rollout.top_p:g} and top_k = {rollout.top_k} bias training: "
            "engines draw tokens from a part of the distribution, but ratios and gradients use "
            "all of it. Train with top_p 1 and top_k 0"
        )
