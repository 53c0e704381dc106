"""Place random drafts, and compare with what one would place by hand.

Run `python -m tests.inference.placing_cases` with TRITON_INTERPRET=1.
"""

from types import SimpleNamespace

import numpy as np
import torch

from engines.inference.drafting.placing import place
from engines.inference.drafting.step_drafts import StepDrafts

SLOTS, MOST, WIDTH, TOKENS = 12, 5, 9, 40


def by_hand(text: list[int], start: int, draft: list[int]) -> list[int]:
    since = text[start:]
    left = draft[len(since) :] if draft[: len(since)] == since else []
    return (left + [0] * MOST)[:MOST]


def run(random: np.random.Generator) -> tuple[int, int]:
    """Place the drafts of a step. Return how many drafts there are, and how many fit the text."""
    texts = [random.integers(1, 4, random.integers(4, TOKENS)).tolist() for _ in range(SLOTS)]
    tokens = torch.full((SLOTS, TOKENS), 9, dtype=torch.int32)
    for slot, text in enumerate(texts):
        tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    slots = random.permutation(SLOTS)[: random.integers(1, SLOTS + 1)]
    packed, expected, num_fitting = [], torch.full((SLOTS, MOST), -5), 0
    for slot in slots:
        text = texts[slot]
        start = len(text) - int(random.integers(0, 4))
        draft = [*text[start:], *random.integers(1, 4, WIDTH)]
        if random.random() < 0.4:
            draft = random.integers(1, 4, WIDTH).tolist()
        draft = [int(token) for token in draft[: random.integers(0, WIDTH + 1)]]
        packed.append([start, len(draft), *draft, *[7] * (WIDTH - len(draft))])
        placed = by_hand(text, start, draft)
        num_fitting += placed[0] > 0
        expected[slot] = torch.tensor(placed)
    states = SimpleNamespace(
        req_id_to_index={f"r{slot}": int(slot) for slot in range(SLOTS)},
        all_token_ids=SimpleNamespace(gpu=tokens),
        total_len=SimpleNamespace(gpu=torch.tensor([len(t) for t in texts], dtype=torch.int32)),
        draft_tokens=torch.full((SLOTS, MOST), -5),
    )
    place(states, StepDrafts([f"r{slot}" for slot in slots], np.array(packed, np.int32)))
    assert torch.equal(states.draft_tokens, expected), (states.draft_tokens, expected)
    return len(slots), num_fitting


def main() -> None:
    random = np.random.default_rng(0)
    num_drafts = num_fitting = 0
    while num_drafts < 400:
        placed, fitting = run(random)
        num_drafts, num_fitting = num_drafts + placed, num_fitting + fitting
    assert 0.3 < num_fitting / num_drafts < 0.9
    print("placed 400")
    # Negative control: a text with one other token gets no draft.
    states = SimpleNamespace(
        req_id_to_index={"a": 0},
        all_token_ids=SimpleNamespace(gpu=torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)),
        total_len=SimpleNamespace(gpu=torch.tensor([4], dtype=torch.int32)),
        draft_tokens=torch.zeros((1, 2), dtype=torch.int64),
    )
    for second, placed in ((4, [5, 6]), (8, [0, 0])):
        packed = np.array([[2, 4, 3, second, 5, 6]], np.int32)
        place(states, StepDrafts(["a"], packed))
        assert states.draft_tokens.tolist() == [placed]
    print("rejected other drafts")


if __name__ == "__main__":
    main()
