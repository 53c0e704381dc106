"""Pack the samples of a micro-batch end to end into one row, the longest first and without
padding.

No sample sees another (`engines.learn.attention`). Some models carry state from token to token by
other means than attention; each of their samples gets its own row
(`engines.learn.sample_isolation`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt with its response. Only tokens of the response that the policy sampled are
    predicted. Tokens that it observed are context."""

    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    sampled: NDArray[np.bool_] | None = field(default=None, kw_only=True)
    """Whether the policy sampled each token after the prompt. None: all of them."""
    experts: bytes = field(default=b"", kw_only=True, repr=False)
    """Experts of its tokens (`schemas.rollout.Generated`). Empty: the policy chooses."""

    @property
    def num_input_tokens(self) -> int:
        """Tokens that the model reads: all but the last, which predicts nothing."""
        return len(self.token_ids) - 1

    @property
    def num_response_tokens(self) -> int:
        """Sampled tokens of the response, which are predicted."""
        if self.sampled is None:
            return len(self.token_ids) - self.num_prompt_tokens
        return int(np.count_nonzero(self.sampled))

    @property
    def response_at(self) -> NDArray[np.int64]:
        """Indices of the predicted tokens in `token_ids`; [num_response_tokens]."""
        if self.sampled is None:
            return np.arange(self.num_prompt_tokens, len(self.token_ids))
        return self.num_prompt_tokens + np.flatnonzero(self.sampled)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward pass: T tokens of S samples, with N predicted tokens."""

    input_ids: NDArray[np.int64]
    """[T]."""
    position_ids: NDArray[np.int64]
    """[T], starting at 0 in each sample."""
    num_tokens: tuple[int, ...]
    """[S], input tokens of each sample, the longest first."""
    predict_at: NDArray[np.int64]
    """[N], index in the row at which each predicted token's distribution is."""
    targets: NDArray[np.int64]
    """[N], the predicted tokens: those sampled in the response of each of `samples`, one after
    another."""
    samples: tuple[int, ...]
    """[S], indices of the samples."""
    experts: tuple[bytes, ...]
    """[S], experts of each sample (`TokenSequence`)."""


def plan_micro_batches(
    num_tokens: Sequence[int], micro_batch_tokens: int, *, alone: bool = False
) -> list[list[int]]:
    """Group samples into micro-batches by first-fit decreasing. With `alone`, each sample gets its
    own.

    `num_tokens`: input tokens of each sample. A micro-batch has at most `micro_batch_tokens`.
    Raises ValueError when a sample is longer than that.
    """
    plans: list[list[int]] = []
    free: list[int] = []
    for sample in sorted(range(len(num_tokens)), key=lambda sample: (-num_tokens[sample], sample)):
        needed = num_tokens[sample]
        if needed > micro_batch_tokens:
            raise ValueError(
                f"a sample of {needed} tokens does not fit into a row of {micro_batch_tokens}: "
                "raise trainer.micro_batch_tokens or trainer.context_parallel"
            )
        at = next((at for at, room in enumerate(free) if room >= needed), len(free))
        if at == len(free):
            plans.append([])
            free.append(micro_batch_tokens)
        plans[at].append(sample)
        free[at] -= micro_batch_tokens if alone else needed
    return plans


def lay_out(samples: Sequence[int], sequences: Sequence[TokenSequence]) -> MicroBatch:
    """Return the arrays of one micro-batch. `samples` are indices into `sequences`, the longest
    first."""
    own = [sequences[sample] for sample in samples]
    num_tokens = [sequence.num_input_tokens for sequence in own]
    starts = np.cumsum([0, *num_tokens[:-1]])
    return MicroBatch(
        input_ids=np.concatenate([one.token_ids[:-1] for one in own]).astype(np.int64),
        position_ids=np.concatenate([np.arange(num) for num in num_tokens]),
        num_tokens=tuple(num_tokens),
        predict_at=np.concatenate(
            [start + one.response_at - 1 for start, one in zip(starts, own, strict=True)]
        ),
        targets=np.concatenate([one.token_ids[one.response_at] for one in own]).astype(np.int64),
        samples=tuple(samples),
        experts=tuple(one.experts for one in own),
    )


def pack(
    sequences: Sequence[TokenSequence], micro_batch_tokens: int, *, alone: bool = False
) -> list[MicroBatch]:
    """Pack all sequences into micro-batches. Raise ValueError when a sequence is too long."""
    for sequence in sequences:
        _check(sequence)
    num_tokens = [sequence.num_input_tokens for sequence in sequences]
    plans = plan_micro_batches(num_tokens, micro_batch_tokens, alone=alone)
    return [lay_out(own, sequences) for own in plans]


def _check(sequence: TokenSequence) -> None:
    num_after_prompt = len(sequence.token_ids) - sequence.num_prompt_tokens
    assert 0 < sequence.num_prompt_tokens < len(sequence.token_ids)
    assert sequence.sampled is None or len(sequence.sampled) == num_after_prompt
    assert sequence.num_response_tokens > 0, "a response without a sampled token"
