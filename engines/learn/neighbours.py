"""Whether the samples of a row are kept apart by a model, tried on the model itself.

Attention is told where each sample begins. Other layers are not: a state space or a convolution
goes on from one sample to the next, and log-probabilities are then wrong by nats. Two sequences,
the second behind the first: what the second is given may depend neither on the first one's tokens
nor on its being there.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from engines.learn.packing import TokenSequence, lay_out
from engines.learn.policy import PolicyModel

ALONE = (
    "samples of this model have rows of their own, which takes longer than packed rows: it carries "
    "something from one to the next (a state space, a convolution), or its attention takes a mask "
    "of all pairs of tokens"
)
BY_PLACE = "attn_temperature_tuning"
"""Setting of Llama 4 by which attention goes by a token's place in the row, not in its sample, and
only far beyond what is tried here."""
NUM_TOKENS = (48, 32)
"""Tokens of the first and of the second sequence."""
OTHER_TOKENS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.01}
"""Most that other tokens before it may change a token's log-probability by, in the mean, in nats:
computed in the same shapes, it is rounded alike, but for experts that share a kernel with them."""
NO_TOKENS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""The same of no tokens before it: shapes differ, and with them how large logits are rounded."""


@torch.no_grad()
def keeps_samples_apart(policy: PolicyModel, dtype: torch.dtype) -> bool:
    """Whether samples of the policy, which computes in `dtype`, may share a row. They may not
    where memory would grow with the row's square.

    Collective: the ranks of a sharded policy make the same passes and agree.
    """
    if policy.masks_all_pairs or getattr(policy.model.config.get_text_config(), BY_PLACE, False):
        return False
    rng = np.random.default_rng(0)
    num_first, num_second = NUM_TOKENS
    one, other = (rng.integers(policy.vocab_size, size=num_first) for _ in range(2))
    second = rng.integers(policy.vocab_size, size=num_second)
    behind_one, behind_other = _last(policy, [one, second]), _last(policy, [other, second])
    differences = torch.tensor(
        [
            np.abs(behind_one - behind_other).mean() / OTHER_TOKENS_TOLERANCE[dtype],
            np.abs(behind_one - _last(policy, [second])).mean() / NO_TOKENS_TOLERANCE[dtype],
        ],
        device=policy.device,
    )
    if dist.is_initialized():
        dist.all_reduce(differences, dist.ReduceOp.MAX)
    return bool((differences <= 1.0).all())


def _last(policy: PolicyModel, token_ids: Sequence[NDArray]) -> NDArray[np.float32]:
    """Log-probabilities of the last of these sequences, which lie in one row."""
    sequences = [TokenSequence(ids.astype(np.int32), 1) for ids in token_ids]
    scored = policy.score(lay_out(range(len(sequences)), sequences), temperature=1.0)
    return scored.logprobs[-sequences[-1].num_response_tokens :].float().cpu().numpy()
