"""Context parallelism: the ranks of a context group share each row of tokens (DeepSpeed-Ulysses,
arXiv 2309.14509).

    tokens of the row    0 ... T/2 │ T/2 ... T
    a rank computes      its tokens: embeddings, norms, projections, MLPs, output layer
                           │ all-to-all: tokens for heads
                         its heads, of all tokens of the row: attention
                           │ all-to-all: heads for tokens
                         its tokens again

So attention sees whole samples, with the same masks as on one rank. Each rank ends with the scores
of the whole row, but only its own part of them has a gradient. The sum of all ranks' gradients is
the row's gradient.

torch's own `context_parallel` (ring attention) supports neither packed samples nor CPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from math import lcm

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from refrain.engines.learn.determinism import probe_sequences
from refrain.engines.learn.packing import MicroBatch, lay_out
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.sample_isolation import NO_TOKENS_TOLERANCE


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that share rows with this rank."""

    size: int
    rank: int
    """Of this process in the group."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, size: int, timeout_s: float) -> "ContextGroup | None":
        """Return this process's group: `size` ranks that follow each other. None for size 1.
        Collective over all ranks."""
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_s))
        assert group is not None, "size divides the number of ranks"
        return cls(size, dist.get_rank(group), group)

    def filled(self, batch: MicroBatch) -> MicroBatch:
        """Return the row with a token for each rank at least: models fail without any. The added
        tokens are samples of their own."""
        missing = max(0, self.size - len(batch.input_ids))
        return replace(
            batch,
            input_ids=np.append(batch.input_ids, np.repeat(batch.input_ids[:1], missing)),
            position_ids=np.append(batch.position_ids, np.zeros(missing, np.int64)),
            num_tokens=(*batch.num_tokens, *[1] * missing),
        )

    def split(self, batch: MicroBatch) -> "RowSplit":
        """Return how the group shares a row: evenly, the first ranks one token more."""
        each, more = divmod(len(batch.input_ids), self.size)
        num_tokens = tuple(each + (rank < more) for rank in range(self.size))
        edges = [0, *accumulate(num_tokens)]
        at = np.searchsorted(batch.predict_at, edges).tolist()
        tokens, predicted = ((on[self.rank], on[self.rank + 1]) for on in (edges, at))
        return RowSplit(self, num_tokens, slice(*tokens), slice(*predicted), at[-1])


@dataclass(frozen=True, slots=True)
class RowSplit:
    """How a context group shares one row."""

    context: ContextGroup
    num_tokens: tuple[int, ...]
    """Tokens of each rank."""
    tokens: slice
    """Place of this rank's tokens in the row."""
    predicted: slice
    """Place of this rank's predicted tokens among those of the row. The token after the last one of
    a rank is predicted by that rank."""
    num_predicted: int
    """Predicted tokens of the row."""

    def own(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's part of the row's arrays. Positions stay those in the samples."""
        return replace(
            batch,
            input_ids=batch.input_ids[self.tokens],
            position_ids=batch.position_ids[self.tokens],
            predict_at=batch.predict_at[self.predicted] - self.tokens.start,
            targets=batch.targets[self.predicted],
        )

    def whole(self, own: Float[Tensor, "own ..."]) -> Float[Tensor, "tokens ..."]:
        """Return the values of all predicted tokens of the row. Only this rank's have a gradient.
        Collective over the group."""
        with torch.no_grad():
            every = own.new_zeros(self.num_predicted, *own.shape[1:])
            every[self.predicted] = own
            dist.all_reduce(every, group=self.context.group)
        return torch.cat([every[: self.predicted.start], own, every[self.predicted.stop :]])

    def to_heads(
        self, rows: Sequence[Float[Tensor, "own any_heads any_width"]]
    ) -> list[Float[Tensor, "tokens any_heads any_width"]]:
        """Return this rank's heads of query, key and value, for all tokens of the row. Repeat key
        and value heads if there are too few. Raise ValueError if the query heads do not divide.
        Collective over the group."""
        size, num_own = self.context.size, len(rows[0])
        if rows[0].shape[1] % size:
            raise ValueError(uneven_heads(rows[0].shape[1], size))
        parts = [_repeated(row, size).unflatten(1, (size, -1)).flatten(2) for row in rows]
        sent = torch.cat(parts, -1).transpose(0, 1).flatten(0, 1)
        got = self._exchange(sent, self.num_tokens, [num_own] * size)
        split = got.split([part.shape[-1] for part in parts], -1)
        return [
            one.unflatten(-1, (-1, row.shape[-1])) for one, row in zip(split, rows, strict=True)
        ]

    def of_heads(self, per_head: Float[Tensor, "heads"]) -> Float[Tensor, "own_heads"]:
        """Return this rank's part of a parameter with one value per query head."""
        return per_head.chunk(self.context.size)[self.context.rank]

    def to_tokens(
        self, out: Float[Tensor, "tokens own_heads width"]
    ) -> Float[Tensor, "own heads width"]:
        """Return all heads of this rank's tokens, from its heads of all tokens. Collective over the
        group."""
        size, num_own = self.context.size, self.num_tokens[self.context.rank]
        got = self._exchange(out.flatten(1), [num_own] * size, self.num_tokens)
        by_rank = got.unflatten(0, (size, num_own)).transpose(0, 1)
        return by_rank.flatten(1).unflatten(1, (-1, out.shape[-1]))

    def _exchange(self, sent: Tensor, received: Sequence[int], given: Sequence[int]) -> Tensor:
        """Send `given` rows to each rank, and receive `received` ones. Differentiable."""
        got = collectives.all_to_all_single(
            sent.contiguous(), list(received), list(given), self.context.group
        )
        return collectives.wait_tensor(got)


def _repeated(row: Tensor, size: int) -> Tensor:
    """Return a row whose heads are repeated until `size` ranks can share them evenly. Each rank's
    query heads then find their key head."""
    num_heads = row.shape[1]
    return (
        row
        if num_heads % size == 0
        else row.repeat_interleave(lcm(num_heads, size) // num_heads, 1)
    )


def uneven_heads(num_heads: int, size: int) -> str:
    """Return the message for attention heads that a context group cannot share evenly."""
    fitting = [str(num) for num in range(1, size) if num_heads % num == 0]
    return (
        f"trainer.context_parallel ({size}) does not divide the {num_heads} attention heads of the "
        f"model: set it to a divisor, for example {fitting[-1]}"
    )


CARRIES_STATE = (
    "trainer.context_parallel is above 1, but ranks cannot share a row of this model: it carries "
    "state from token to token by other means than attention, makes its own masks, or scales "
    "attention by the place in the row. Set trainer.context_parallel=1, and "
    "trainer.micro_batch_tokens to the longest sample"
)


@torch.no_grad()
def share_rows(policy: PolicyModel, context: ContextGroup | None, dtype: torch.dtype) -> None:
    """Let a context group share the rows of a loaded policy, and check the result. None: nothing
    changes.

    `dtype`: data type in which the policy computes. Raise ValueError when the model needs a row for
    each sample, or computes other values when its row is shared. Collective.
    """
    if context is None:
        return
    if policy.alone or policy.is_recurrent:
        raise ValueError(CARRIES_STATE)
    batch = lay_out([0, 1], probe_sequences(policy))
    expected = policy.score(batch, 1.0).logprobs
    policy.context = context
    difference = (policy.score(batch, 1.0).logprobs - expected).abs().mean().item()
    if not difference <= NO_TOKENS_TOLERANCE[dtype]:
        raise ValueError(
            f"{type(policy.model).__name__} computes other values when {context.size} ranks share "
            f"a row: {difference:.2g} nats in the mean. Set trainer.context_parallel=1"
        )
