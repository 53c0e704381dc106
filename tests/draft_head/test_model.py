"""A draft head computes what it is defined as."""

import numpy as np
import torch

from refrain.engines.draft_head.model import DraftHead, draft_vocabulary

NUM_ROWS, SIZE, INNER = 3, 8, 5
VOCABULARY = torch.arange(16)


def normed(x: list[float]) -> list[float]:
    mean = sum(value * value for value in x) / len(x)
    return [value / (mean + 1e-6) ** 0.5 for value in x]


def times(matrix: list[list[float]], x: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, x, strict=True)) for row in matrix]


def silu(x: float) -> float:
    return x / (1.0 + 2.718281828459045**-x)


def stepped(weights: dict[str, list], hidden: list[float], embeddings: list[list[float]]):
    """Compute the output for one row in a loop over numbers."""
    state = normed(hidden)
    for embedding in embeddings:
        both = [*state, *normed(embedding)]
        wide = times(weights["up.weight"], both)
        inner = [silu(g) * u for g, u in zip(wide[:INNER], wide[INNER:], strict=True)]
        added = times(weights["down.weight"], inner)
        mixed = times(weights["mix.weight"], both)
        state = normed([a + b for a, b in zip(mixed, added, strict=True)])
    return [a * b for a, b in zip(state, weights["scale"], strict=True)]


def test_it_computes_its_definition():
    torch.manual_seed(0)
    head = DraftHead(SIZE, VOCABULARY, INNER).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    hidden, *embeddings = torch.randn(3, NUM_ROWS, SIZE, dtype=torch.double)
    state = head.begin(hidden)
    for embedding in embeddings:
        state = head.step(state, embedding)
    weights = {name: one.tolist() for name, one in head.state_dict().items()}
    for row in range(NUM_ROWS):
        expected = stepped(weights, hidden[row].tolist(), [e[row].tolist() for e in embeddings])
        assert torch.allclose(head.output(state)[row], torch.tensor(expected).double(), atol=1e-6)


def test_a_new_head_repeats_the_hidden_state():
    head = DraftHead(SIZE, VOCABULARY)
    state = head.begin(torch.randn(NUM_ROWS, SIZE))
    assert torch.allclose(head.step(state, torch.randn(NUM_ROWS, SIZE)), state, atol=1e-5)


def test_the_draft_vocabulary_is_what_the_policy_samples_most() -> None:
    sampled = [np.array([7, 3, 7, 900]), np.array([3, 7, 12])]
    assert draft_vocabulary(sampled).tolist() == [3, 7, 12, 900]
    assert draft_vocabulary(sampled, 2).tolist() == [3, 7]
