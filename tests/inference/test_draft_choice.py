"""On the device, the drafts that would have been right more often are chosen."""

import numpy as np
import pytest
import torch

from refrain.engines.inference.drafting.draft_choice import FORGET, NO_DRAFT, DraftChoice

NUM_SLOTS, WINDOW, VOCAB = 5, 4, 3


def compared(draft: list[int], tokens: list[int]) -> tuple[int, int]:
    """Return how many tokens of a draft are right, and how many were compared; in a loop."""
    right = tried = 0
    for drafted, token in zip(draft, tokens, strict=False):
        if drafted == NO_DRAFT:
            break
        tried += 1
        if drafted != token:
            break
        right += 1
    return right, tried


def test_shares_are_those_of_a_loop() -> None:
    rng, choice = np.random.default_rng(0), DraftChoice(NUM_SLOTS, WINDOW, torch.device("cpu"))
    offered = np.full((2, NUM_SLOTS, WINDOW), NO_DRAFT)
    right, tried = np.zeros(2), np.zeros(2)
    for _ in range(60):
        slots = rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)]
        tokens = rng.integers(VOCAB, size=(len(slots), WINDOW))
        num = rng.integers(0, WINDOW + 2, len(slots))
        choice.learn(*map(torch.from_numpy, (slots, tokens, num)))
        for source in range(2):
            pairs = [
                compared(offered[source, slot].tolist(), row[:own].tolist())
                for slot, row, own in zip(slots, tokens, num, strict=True)
            ]
            right[source], tried[source] = (
                before * FORGET + sum(column)
                for before, column in zip(
                    (right[source], tried[source]), zip(*pairs, strict=True), strict=True
                )
            )
        drafts = rng.integers(VOCAB, size=(2, len(slots), WINDOW))
        for source, row in zip(*np.nonzero(rng.random((2, len(slots))) < 0.2), strict=True):
            drafts[source, row] = NO_DRAFT
        drafts[1, :, rng.integers(1, WINDOW + 1) :] = NO_DRAFT
        choice.choose(torch.from_numpy(slots), torch.from_numpy(drafts))
        offered[:, slots] = drafts
        if rng.random() < 0.3:
            choice.begin(int(slots[0]))
            offered[:, slots[0]] = NO_DRAFT
    assert choice._right.tolist() == pytest.approx(right.tolist(), rel=1e-4)
    assert choice._tried.tolist() == pytest.approx(tried.tolist(), rel=1e-4)
    assert tried.min() > 20


@pytest.mark.parametrize("better", [0, 1])
def test_the_better_draft_is_chosen_where_there_are_two(better: int) -> None:
    choice = DraftChoice(NUM_SLOTS, WINDOW, torch.device("cpu"))
    slots = torch.arange(2)
    drafts = torch.zeros(2, 2, WINDOW, dtype=torch.int64)
    drafts[better] = 1
    for _ in range(5):
        choice.choose(slots, drafts)
        choice.learn(slots, torch.ones(2, WINDOW, dtype=torch.int64), torch.tensor([2, 3]))
    assert (choice.choose(slots, drafts) == 1).all()
    drafts[better, 1] = NO_DRAFT
    assert choice.choose(slots, drafts)[:, 0].tolist() == [1, 0]
    drafts[1 - better, 1] = NO_DRAFT
    assert choice.choose(slots, drafts)[1, 0] == NO_DRAFT
