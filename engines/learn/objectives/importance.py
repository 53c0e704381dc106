"""Importance weights: correct for tokens that another policy generated."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from refrain.engines.learn.objectives.ratios import bounded_ratios, over_sequences


def importance_weights(
    log_ratios: Float[Tensor, "tokens"],
    counted: Bool[Tensor, "tokens"],
    num_tokens: Sequence[int],
    *,
    cap: float,
    floor: float | None = None,
    mode: str = "token_truncate",
) -> tuple[Float[Tensor, "tokens"], Bool[Tensor, "tokens"]]:
    """Return the weight of each token's policy loss, and where it was truncated or set to 0.

    `log_ratios`: log pi_old - log pi_inference, 0 where tokens do not count. Weights have no
    gradient and do not apply to the KL term. `floor`: 1 / cap by default.

    `token_truncate`: min(ratio, cap), truncated importance sampling (Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training", 2025). Without a cap, it makes the
    decoupled objective of AReaL (arXiv:2505.24298, section 5.2), with pi_old as proximal policy.

    `token_mask`: the ratio, or 0 outside floor and cap. IcePop has 0.5 and 5 (arXiv:2510.18855).
    AReaL's code masks above 5 alone.

    `sequence_...`: the same with the product over a response (Liu et al., "When Speed Kills
    Stability", 2025).

    `geometric_mask`: 1, or 0 if the geometric mean over a response is outside floor and cap, as
    veRL's geometric rejection.

    A deviation from veRL: rejected tokens stay in the denominators.
    """
    level, _, beyond = mode.partition("_")
    log_ratios = log_ratios.detach()
    if level != "token":
        how = "mean" if level == "geometric" else "sum"
        log_ratios = over_sequences(log_ratios, counted, num_tokens, how)
    ratio = bounded_ratios(log_ratios)
    if beyond == "truncate":
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio > cap) | (ratio < (1.0 / cap if floor is None else floor))
    weights = torch.ones_like(ratio) if level == "geometric" else ratio
    return torch.where(outside, 0.0, weights), outside
