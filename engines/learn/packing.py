"""Packing: the samples of a micro-batch lie end to end in one row, the longest first, and none of
them sees another (`engines.learn.attention`). Nothing is filled up. Samples of a model whose layers
carry something from token to token by other means than attention lie in rows of their own
(`engines.learn.neighbours`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt with a response. Only the response's tokens are predicted."""

    token_ids: NDArray[np.int32]
    num_prompt_tokens: int

    @property
    def num_input_tokens(self) -> int:
        """Tokens that the model reads: the last one predicts nothing that is wanted, so it is no
        input."""
        return len(self.token_ids) - 1

    @property
    def num_response_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward pass: T tokens of S samples, with N predicted tokens."""

    input_ids: NDArray[np.int64]
    """[T]."""
    position_ids: NDArray[np.int64]
    """[T], restarting at 0 with each sample."""
    num_tokens: tuple[int, ...]
    """[S], input tokens of each sample, falling."""
    predict_at: NDArray[np.int64]
    """[N], where in the row each predicted token's distribution is."""
    targets: NDArray[np.int64]
    """[N], the predicted tokens: the response of each of `samples`, one after another."""
    samples: tuple[int, ...]
    """[S], indices of the samples."""


def plan_micro_batches(
    num_tokens: Sequence[int], micro_batch_tokens: int, *, alone: bool = False
) -> list[list[int]]:
    """First-fit decreasing: which samples share which micro-batch; `alone`: none do.

    `num_tokens`: input tokens of each sample; a micro-batch stays within `micro_batch_tokens`.
    Raises ValueError when a sample is longer than that.
    """
    plans: list[list[int]] = []
    free: list[int] = []
    for sample in sorted(range(len(num_tokens)), key=lambda sample: (-num_tokens[sample], sample)):
        needed = num_tokens[sample]
        if needed > micro_batch_tokens:
            raise ValueError(
                f"a sample of {needed} tokens does not fit into trainer.micro_batch_tokens = "
                f"{micro_batch_tokens}: raise it"
            )
        at = next((at for at, room in enumerate(free) if room >= needed), len(free))
        if at == len(free):
            plans.append([])
            free.append(micro_batch_tokens)
        plans[at].append(sample)
        free[at] -= micro_batch_tokens if alone else needed
    return plans


def lay_out(samples: Sequence[int], sequences: Sequence[TokenSequence]) -> MicroBatch:
    """The arrays of one micro-batch. `samples` index into `sequences`, the longest first."""
    own = [sequences[sample] for sample in samples]
    num_tokens = [sequence.num_input_tokens for sequence in own]
    starts = np.cumsum([0, *num_tokens[:-1]])
    return MicroBatch(
        input_ids=np.concatenate([one.token_ids[:-1] for one in own]).astype(np.int64),
        position_ids=np.concatenate([np.arange(num) for num in num_tokens]),
        num_tokens=tuple(num_tokens),
        predict_at=np.concatenate(
            [
                np.arange(start + one.num_prompt_tokens - 1, start + one.num_input_tokens)
                for start, one in zip(starts, own, strict=True)
            ]
        ),
        targets=np.concatenate([one.token_ids[one.num_prompt_tokens :] for one in own]).astype(
            np.int64
        ),
        samples=tuple(samples),
    )


def pack(
    sequences: Sequence[TokenSequence], micro_batch_tokens: int, *, alone: bool = False
) -> list[MicroBatch]:
    """All sequences as micro-batches; `plan_micro_batches` raises when one is too long."""
    for sequence in sequences:
        assert 0 < sequence.num_prompt_tokens < len(sequence.token_ids)
    num_tokens = [sequence.num_input_tokens for sequence in sequences]
    plans = plan_micro_batches(num_tokens, micro_batch_tokens, alone=alone)
    return [lay_out(own, sequences) for own in plans]
