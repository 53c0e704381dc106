"""The weight of each token in the loss."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def token_weights(
    counted: Sequence[NDArray[np.bool_]],
    aggregation: str,
    *,
    total_tokens: int,
    total_sequences: int,
    max_response_tokens: int,
) -> list[NDArray[np.float32]]:
    """Return the weight of each token in the loss, given the totals of the WHOLE minibatch.

    `token_mean`: 1 / total_tokens (DAPO, arXiv:2503.14476, section 3.3).

    `sequence_mean`: 1 / (total_sequences * |o_i|) (DeepSeekMath, arXiv:2402.03300, equation 3).

    `fixed_length`: 1 / (total_sequences * max_response_tokens) (Dr. GRPO, arXiv:2503.20783, section
    3.2; its `masked_mean` by the generation budget).

    `counted` marks the tokens of the given samples that count. Other tokens have weight 0 and are
    in no denominator: |o_i| and `total_tokens` are counted tokens, and `total_sequences` are
    samples with such a token. Over the whole minibatch the weights sum to 1, except with
    `fixed_length`.
    """

    def weight(num_counted: int) -> float:
        if aggregation == "token_mean":
            return 1.0 / max(1, total_tokens)
        length = max(1, num_counted) if aggregation == "sequence_mean" else max_response_tokens
        return 1.0 / (max(1, total_sequences) * length)

    return [tokens.astype(np.float32) * np.float32(weight(tokens.sum())) for tokens in counted]
