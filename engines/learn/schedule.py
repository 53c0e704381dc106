"""Learning-rate schedule: a pure function of the number of optimiser updates."""

import math

from refrain.schemas.trainer import TrainerConfig


def learning_rate_share(num_done: int, config: TrainerConfig) -> float:
    """Return the learning rate after `num_done` updates, as a share of `learning_rate`.

    The rate rises linearly over `warmup_steps`. Then it stays constant, or falls to
    `min_learning_rate` over `decay_steps`: linearly, or along half a cosine (arXiv:1608.03983,
    equation 5, one period).
    """
    if num_done < config.warmup_steps:
        return (num_done + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    assert config.decay_steps, "checked with the config"
    done = min(1.0, (num_done - config.warmup_steps) / config.decay_steps)
    left = 1.0 - done if config.decay == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
    lowest = config.min_learning_rate / config.learning_rate
    return lowest + (1.0 - lowest) * left
