"""Packing: several samples share a row of a micro-batch, and none of them sees another.

A micro-batch is a rectangle of rows. Samples lie end to end in a row; their positions restart at
0, which is how transformers' mask code tells them apart (`find_packed_sequence_indices`) when it
is given position ids and neither an attention mask nor a cache. The dense mask it makes costs
`row_tokens` squared per row, so rows are only as long as the longest sample of their micro-batch:
samples are placed longest first, which also keeps that length nearly tight. One row per
micro-batch would be simpler, and was measured 7 times slower at 4096 tokens and 50 times slower
at 16384 (samples of 40 tokens, 4 layers of width 128, one CPU core).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_ROW_TOKENS = 128
"""Rows are not shorter, so that short samples share one: less padding, and the cost of attention
is still below that of the matrix products."""


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
    """Input of one forward pass: R rows of T tokens with N predicted tokens."""

    input_ids: NDArray[np.int64]
    """[R, T], 0 where nothing lies."""
    position_ids: NDArray[np.int64]
    """[R, T], restarting at 0 with each sample, and 0 where nothing lies."""
    predict_at: NDArray[np.int64]
    """[N], where in the flattened rows each predicted token's distribution is."""
    targets: NDArray[np.int64]
    """[N], the predicted tokens: the response of each of `samples`, one after another."""
    samples: tuple[int, ...]
    """Indices of the samples, in the order of `targets`."""


Rows = list[list[int]]
"""Sample indices by row."""


def plan_rows(num_tokens: Sequence[int], micro_batch_tokens: int) -> list[Rows]:
    """First-fit decreasing: which samples share which row of which micro-batch.

    `num_tokens`: input tokens of each sample; rows x row length of a micro-batch stays within
    `micro_batch_tokens`. Raises ValueError when a sample is longer than that.
    """
    waiting = sorted(range(len(num_tokens)), key=lambda sample: (-num_tokens[sample], sample))
    if waiting and num_tokens[waiting[0]] > micro_batch_tokens:
        raise ValueError(
            f"a sample of {num_tokens[waiting[0]]} tokens does not fit into "
            f"trainer.micro_batch_tokens = {micro_batch_tokens}: raise it"
        )
    plans = []
    while waiting:
        rows, waiting = _fill(waiting, num_tokens, micro_batch_tokens)
        plans.append(rows)
    return plans


def _fill(
    waiting: list[int], num_tokens: Sequence[int], micro_batch_tokens: int
) -> tuple[Rows, list[int]]:
    """One micro-batch, and the samples that it has no room for."""
    length = min(max(num_tokens[waiting[0]], MIN_ROW_TOKENS), micro_batch_tokens)
    max_rows = micro_batch_tokens // length
    shortest = num_tokens[waiting[-1]]
    rows: Rows = []
    free: list[int] = []
    left: list[int] = []
    for at, sample in enumerate(waiting):
        if len(rows) == max_rows and max(free) < shortest:
            return rows, left + waiting[at:]
        needed = num_tokens[sample]
        row = next((row for row, room in enumerate(free) if room >= needed), None)
        if row is None and len(rows) == max_rows:
            left.append(sample)
            continue
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(length)
        rows[row].append(sample)
        free[row] -= needed
    return rows, left


def lay_out(rows: Rows, sequences: Sequence[TokenSequence]) -> MicroBatch:
    """The arrays of one planned micro-batch. `rows` index into `sequences`."""
    length = max(sum(sequences[sample].num_input_tokens for sample in row) for row in rows)
    input_ids = np.zeros((len(rows), length), dtype=np.int64)
    position_ids = np.zeros_like(input_ids)
    predict_at, targets = [], []
    for at, row in enumerate(rows):
        start = 0
        for sample in row:
            sequence = sequences[sample]
            end = start + sequence.num_input_tokens
            input_ids[at, start:end] = sequence.token_ids[:-1]
            position_ids[at, start:end] = np.arange(end - start)
            first = at * length + start + sequence.num_prompt_tokens - 1
            predict_at.append(np.arange(first, at * length + end))
            targets.append(sequence.token_ids[sequence.num_prompt_tokens :])
            start = end
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        predict_at=np.concatenate(predict_at),
        targets=np.concatenate(targets).astype(np.int64),
        samples=tuple(sample for row in rows for sample in row),
    )


def pack(sequences: Sequence[TokenSequence], micro_batch_tokens: int) -> list[MicroBatch]:
    """All sequences as micro-batches; `plan_rows` raises when one is too long."""
    for sequence in sequences:
        assert 0 < sequence.num_prompt_tokens < len(sequence.token_ids)
    num_tokens = [sequence.num_input_tokens for sequence in sequences]
    return [lay_out(rows, sequences) for rows in plan_rows(num_tokens, micro_batch_tokens)]
