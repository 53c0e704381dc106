"""Check, on the model itself, that the samples of a row stay apart.

Attention knows where each sample begins; other layers may not. A state space or a convolution runs
on from one sample into the next, unless its kernel takes the bounds (`engines.learn.recurrent`).
Log-probabilities are then wrong by nats. The check packs two sequences into one row. The second
one's values must not depend on the first one's tokens, nor on whether there is a first one.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from refrain.engines.learn.packing import TokenSequence, lay_out
from refrain.engines.learn.policy import PolicyModel

ALONE = (
    "each sample of this model gets its own row, which is slower than packing. The model carries "
    "state from one sample to the next (a state space, a convolution), or its attention needs a "
    "mask of all pairs of tokens. If it has linear attention or convolutions, install "
    "flash-linear-attention and causal-conv1d on GPUs: their kernels keep samples apart"
)
BY_PLACE = "attn_temperature_tuning"
"""Setting of Llama 4 that scales attention by a token's place in the row, not in its sample. Its
effect begins far beyond the lengths tried here."""
NUM_TOKENS = (48, 32)
"""Tokens of the first and of the second sequence."""
OTHER_TOKENS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.01}
"""Largest mean change of a token's log-probability, in nats, when the tokens before it change. The
shapes stay the same, so rounding does too, except in experts that share a kernel with them."""
NO_TOKENS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""The same when the tokens before it are removed. Shapes change, and large logits round
differently."""


@torch.no_grad()
def keeps_samples_apart(policy: PolicyModel, dtype: torch.dtype) -> bool:
    """Return whether samples of the policy may share a row. They may not if memory would then grow
    with the square of the row's length. `dtype`: data type in which the policy computes.

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
    """Return the log-probabilities of the last of these sequences, packed into one row."""
    sequences = [TokenSequence(ids.astype(np.int32), 1) for ids in token_ids]
    scored = policy.score(lay_out(range(len(sequences)), sequences), temperature=1.0)
    return scored.logprobs[-sequences[-1].num_response_tokens :].float().cpu().numpy()
