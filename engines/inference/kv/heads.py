"""Map KV heads to TP ranks, also between engines that differ in their TP degree.

vLLM distributes a model's KV heads over the ranks in order. With more ranks than heads, consecutive
ranks have the same head, and the first of these ranks saves it.

    2 heads    TP 1   rank 0: heads 0 1
               TP 2   rank 0: head 0             rank 1: head 1
               TP 4   ranks 0 and 1: head 0      ranks 2 and 3: head 1
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Heads that a rank copies from the file of another engine's rank."""

    saved_by: int
    """Rank of the other engine that saved the heads."""
    there: slice
    """The heads among that rank's heads."""
    here: slice
    """The heads among this rank's heads."""


def heads_of(rank: int, tp_degree: int, num_heads: int) -> range:
    """Return the KV heads of a rank. `num_heads`: KV heads of the model."""
    small, large = sorted((tp_degree, num_heads))
    assert large % small == 0, f"vLLM cannot split {num_heads} KV heads over {tp_degree} ranks"
    first = rank * num_heads // tp_degree
    return range(first, first + max(1, num_heads // tp_degree))


def saves(rank: int, tp_degree: int, num_heads: int) -> bool:
    """Return whether a rank saves its heads: True unless the rank before has the same ones."""
    heads = heads_of(rank, tp_degree, num_heads)
    return rank == 0 or heads != heads_of(rank - 1, tp_degree, num_heads)


def pieces(rank: int, tp_degree: int, saved_tp_degree: int, num_heads: int) -> Iterator[Piece]:
    """Yield the pieces that together give all heads of a rank.

    `tp_degree`: of this engine. `saved_tp_degree`: of the engine that saved the files.
    """
    wanted = heads_of(rank, tp_degree, num_heads)
    for saved_by in range(saved_tp_degree):
        if not saves(saved_by, saved_tp_degree, num_heads):
            continue
        saved = heads_of(saved_by, saved_tp_degree, num_heads)
        common = range(max(wanted.start, saved.start), min(wanted.stop, saved.stop))
        if common:
            yield Piece(saved_by, _within(common, saved), _within(common, wanted))


def _within(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)
