"""Train a draft head on tokens that the policy sampled, and measure how often both agree.

    token n-1   token n   token n+1        sampled one after the other
    hidden n-1  hidden n  hidden n+1       hidden n gave token n, as logits(hidden n)
       └ state ─token n-1─► depth 1 ─token n─► depth 2
                            for hidden n       for hidden n+1

At each depth the policy's own distribution over the head's draft vocabulary is the target. The loss
is KL(policy, head) at the sampling temperature, over sampled tokens only. The gradient stays inside
the head. Only one chunk of logits exists at a time.

Source: ReDrafter (arXiv 2403.09919, section 3.3) distils from the policy, too. Deviations: it
distils on continuations that the policy samples anew at each position; here the rollouts serve,
which the policy sampled anyway. Depths count less the deeper they are, as in EAGLE (arXiv
2401.15077). Targets ignore top-k and top-p.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refrain.engines.draft_head.model import DraftHead

DECAY = 0.8
"""Weight of a depth in the loss over that of the depth before: a draft token counts only if all
before it were right."""
MAX_LOGITS = 2**24
"""Most logits of a chunk: 64 MiB in float32, and a few copies."""
Logits = Callable[[Tensor], Tensor]
"""The policy's `lm_head`: hidden states [N, H] to float32 logits, [N, V] of all tokens or [N, D] of
the draft vocabulary."""


class SampledTokens(NamedTuple):
    """Tokens that the policy sampled, text after text."""

    hidden: Float[Tensor, "tokens width"]
    """Input of the `lm_head` that gave each token."""
    embeddings: Float[Tensor, "tokens width"]
    """The policy's embedding of each token."""
    token_ids: Int[Tensor, "tokens"]
    follows: Bool[Tensor, "tokens"]
    """Whether a token comes directly after the one before it, in the same text."""


class DepthDrafts(NamedTuple):
    """Drafts of one depth: one for each token that can be drafted at this depth."""

    at: Int[Tensor, "drafts"]
    """Index of the token."""
    outputs: Float[Tensor, "drafts width"]
    """Inputs of the policy's `lm_head`."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of head and policy when both draw with the same noise, by depth. A draft token is
    accepted if and only if they agree."""

    num_drafted: tuple[int, ...]
    num_right: tuple[int, ...]
    """Drafts that agree, after tokens that the policy sampled."""
    num_accepted: tuple[int, ...]
    """Drafts that agree as all before them from the same position do."""

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Probability of agreement at each depth."""
        return tuple(r / max(1, n) for r, n in zip(self.num_right, self.num_drafted, strict=True))

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification of drafts of this depth, the bonus token included. It weighs all
        positions alike, while an engine verifies more often where drafts fail."""
        pairs = zip(self.num_accepted, self.num_drafted, strict=True)
        return 1.0 + sum(accepted / max(1, drafted) for accepted, drafted in pairs)

    def __add__(self, other: "Agreement") -> "Agreement":
        def added(own: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
            return tuple(a + b for a, b in zip(own, others, strict=True))

        return Agreement(
            added(self.num_drafted, other.num_drafted),
            added(self.num_right, other.num_right),
            added(self.num_accepted, other.num_accepted),
        )


def unroll(head: DraftHead, tokens: SampledTokens, depth: int) -> list[DepthDrafts]:
    """Return the drafts of depths 1 to `depth`. Sampled tokens are fed back (teacher forcing).

    A draft of depth d begins d tokens before its own, and all tokens between are sampled.
    """
    start = torch.arange(len(tokens.token_ids), device=tokens.token_ids.device)
    states = head.begin(tokens.hidden)
    drafts = []
    for reached in range(depth):
        has_next = start + reached + 1 < len(tokens.token_ids)
        kept = has_next & tokens.follows[(start + reached + 1) * has_next]
        start, states = start[kept], states[kept]
        states = head.step(states, tokens.embeddings[start + reached])
        drafts.append(DepthDrafts(start + reached + 1, head.output(states)))
    return drafts


def backpropagate(
    head: DraftHead, tokens: SampledTokens, logits: Logits, temperature: float, depth: int
) -> float | None:
    """Add the loss's gradient to the head's gradients. Return the loss, in nats a token: the mean
    of KL(policy, head) over all drafts, weighted by DECAY. None: there is nothing to draft.

    `logits`: of the draft vocabulary."""
    drafts = unroll(head, tokens, depth)
    weights = [DECAY**d for d in range(depth)]
    total = sum(w * len(one.at) for w, one in zip(weights, drafts, strict=True))
    if not total:
        return None
    gradients = [torch.zeros_like(one.outputs) for one in drafts]
    loss = 0.0
    for chunk, target in _targets(tokens, logits, temperature):
        for d, (rows, kept) in _drafts_in(chunk, drafts):
            outputs = drafts[d].outputs[rows].detach().requires_grad_()
            own = F.log_softmax(logits(outputs) / temperature, dim=-1)
            part = F.kl_div(own, target[kept], reduction="sum", log_target=True)
            part = part * (weights[d] / total)
            # Not `backward`: it would also compute gradients of the policy's `lm_head`.
            (gradients[d][rows],) = torch.autograd.grad(part, outputs)
            loss += part.item()
    torch.autograd.backward([one.outputs for one in drafts], gradients)
    return loss


@torch.no_grad()
def measure(
    head: DraftHead,
    tokens: SampledTokens,
    logits: Logits,
    draft_logits: Logits,
    temperature: float,
    depth: int,
    generator: torch.Generator,
) -> Agreement:
    """Return how often head and policy agree under noise that drew these tokens. `logits`: of all
    tokens. `draft_logits`: of the draft vocabulary. `generator`: on the device of the tokens."""
    drafts = unroll(head, tokens, depth)
    right = [torch.zeros_like(tokens.follows) for _ in drafts]
    for chunk, target in _targets(tokens, logits, temperature):
        noise = hindsight_noise(target, tokens.token_ids[chunk], generator)
        for d, (rows, kept) in _drafts_in(chunk, drafts):
            at = drafts[d].at[rows]
            scores = draft_logits(drafts[d].outputs[rows]) / temperature
            drawn = (scores + noise[kept][:, head.token_ids]).argmax(-1)
            right[d][at] = head.token_ids[drawn] == tokens.token_ids[at]
    return _count(drafts, right)


def hindsight_noise(
    logprobs: Float[Tensor, "tokens vocab"],
    token_ids: Int[Tensor, "tokens"],
    generator: torch.Generator | None = None,
) -> Float[Tensor, "tokens vocab"]:
    """Return Gumbel noise with which the argmax of `logprobs` + noise is each token: a fair draw,
    given that outcome.

    The largest sum is a Gumbel variable of location 0, whichever token has it. The other sums are
    Gumbel variables below it (Maddison, Tarlow and Minka, NeurIPS 2014, section 3).
    """
    waits = torch.empty_like(logprobs).exponential_(generator=generator)
    soonest = torch.empty_like(logprobs[:, :1]).exponential_(generator=generator)
    sums = -torch.logaddexp(soonest.log(), waits.log() - logprobs)
    return sums.scatter(-1, token_ids[:, None], -soonest.log()) - logprobs


def _targets(
    tokens: SampledTokens, logits: Logits, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the tokens, with the policy's log-probabilities there."""
    scored = torch.no_grad()(lambda hidden: F.log_softmax(logits(hidden) / temperature, dim=-1))
    size = max(1, MAX_LOGITS // scored(tokens.hidden[:1]).shape[-1])
    for first in range(0, len(tokens.token_ids), size):
        chunk = slice(first, first + size)
        yield chunk, scored(tokens.hidden[chunk])


def _drafts_in(
    chunk: slice, drafts: Sequence[DepthDrafts]
) -> Iterator[tuple[int, tuple[slice, Tensor]]]:
    """Yield each depth's drafts of the tokens in a chunk: their rows, and their tokens' places in
    the chunk. Depths without any are left out."""
    for d, one in enumerate(drafts):
        first, last = torch.searchsorted(
            one.at, torch.tensor([chunk.start, chunk.stop], device=one.at.device)
        ).tolist()
        if first < last:
            yield d, (slice(first, last), one.at[first:last] - chunk.start)


def _count(drafts: Sequence[DepthDrafts], right: Sequence[Tensor]) -> Agreement:
    """`right`: whether each depth's draft of a token is right, [tokens] each."""
    chains = [
        torch.stack([right[k][one.at - d + k] for k in range(d + 1)]).all(0)
        for d, one in enumerate(drafts)
    ]
    return Agreement(
        tuple(len(one.at) for one in drafts),
        tuple(int(right[d][one.at].sum()) for d, one in enumerate(drafts)),
        tuple(int(chain.sum()) for chain in chains),
    )
