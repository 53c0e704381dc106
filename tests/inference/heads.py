"""Draft heads for tests, and a policy that one of them always drafts right."""

from pathlib import Path

import torch
from torch import Tensor

from refrain.engines.draft_head.files import save
from refrain.engines.draft_head.model import MOST_TOKENS, DraftHead
from refrain.engines.learn.learner import Learner
from tests.inference.real import CONFIG

LEAVES = ("o_proj.weight", "down_proj.weight")
"""Matrices through which a layer adds to the residual stream."""
NORM = "model.norm.weight"


def random_head(directory: Path) -> Path:
    """Write a head that is sure of wrong tokens, half of all. Return its directory."""
    torch.manual_seed(0)
    head = DraftHead(128, torch.arange(0, 36, 2))
    with torch.no_grad():
        head.mix.weight.normal_()
        head.scale.fill_(3.0)
    save(head, directory, vocab_size=36, window=4)
    return directory


def right_head(directory: Path, scale: Tensor, vocab_size: int = 36) -> Path:
    """Write a head whose output is the last token's embedding, normed and scaled as the policy of
    `memoryless` does it. Return its directory."""
    head = DraftHead(len(scale), torch.arange(min(vocab_size, MOST_TOKENS)))
    with torch.no_grad():
        head.mix.weight.copy_(torch.eye(len(scale), 2 * len(scale)).roll(len(scale), dims=1))
        head.scale.copy_(scale)
    save(head, directory, vocab_size=vocab_size, window=4)
    return directory


def memoryless(shift: int = 0, norm: float = 0.3) -> tuple[Learner, Tensor]:
    """Return a learner whose policy sees the last token alone, and the weights of its last norm.

    Every layer adds nothing, so the last norm gets the token's embedding. A small `norm` makes the
    distribution flat. `shift`: each token gets the embedding of the token so many ids before.
    """
    learner = Learner(CONFIG)
    learner.restore(None)
    own = dict(learner._policy.model.named_parameters())
    with torch.no_grad():
        for name, one in own.items():
            if name.endswith(LEAVES):
                one.zero_()
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                one.copy_(one.roll(shift, dims=0))
        own[NORM].fill_(norm)
    return learner, own[NORM].detach().clone()
