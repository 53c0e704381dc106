"""The noise of exact sampling is a pure function of its arguments, and gives fair samples."""

import math

import numpy as np
import pytest
import torch

from refrain.benchmarks.noise_tail import tail
from refrain.engines.inference.sampling.noise import (
    WORD,
    gumbel,
    gumbel_noise,
    perturbed_argmax,
    philox,
)
from refrain.schemas.keys import sample_key


def keys_of(n: int) -> torch.Tensor:
    return torch.tensor([sample_key(0, 1, "train", "p", i) for i in range(n)])


def test_noise_is_a_pure_function_of_its_arguments():
    keys, positions = keys_of(64), torch.arange(64) * 7
    whole = gumbel_noise(keys, positions, 50)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(gumbel_noise(keys[order], positions[order], 50), whole[order])
    assert torch.equal(gumbel_noise(keys[3:4], positions[3:4], 50), whole[3:4])
    # A larger vocabulary (padding) leaves the noise of the first tokens as it was.
    assert torch.equal(gumbel_noise(keys, positions, 64)[:, :50], whole)


@pytest.mark.parametrize(
    ("first", "second", "key", "expected"),
    [
        (0, 0, 0, (0x257A3673, 0xCD26BE2A)),
        (WORD, WORD, WORD, (0xAB302C4D, 0x3DC9D239)),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
    ],
)
def test_the_generator_is_philox(first, second, key, expected):
    """The expected words are the known answers of Random123, the library of Philox's authors."""
    words = philox(*(torch.tensor(word) for word in (key, first, second)))
    assert tuple(word.item() for word in words) == expected


def test_noise_is_what_64_bits_make_it():
    """The noise is accurate to 1e-6, even where the uniform number is close to 0 or 1."""
    random = torch.Generator().manual_seed(0)
    first, second = torch.randint(0, 2**32, (2, 10**6), generator=random)
    first[:64] = torch.tensor([2**bit - 1 for bit in range(32)] + [2**32 - 2**b for b in range(32)])
    first[64:128], second[64:128] = 0, second[:64] >> torch.arange(64) % 32
    x = (np.longdouble(first.numpy()) * 2.0**32 + np.longdouble(second.numpy() | 1)) * 2.0**-64
    expected = -np.log(-np.log1p(-x))
    assert np.isfinite(expected).all()
    error = np.abs(gumbel(first, second).numpy() - expected) / np.maximum(1.0, np.abs(expected))
    assert error.max() < 1e-6
    assert torch.isfinite(gumbel(torch.tensor([0, WORD]), torch.tensor([0, WORD]))).all()


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(keys_of(400), torch.arange(400), 500).double()
    assert abs(noise.mean().item() - 0.57722) < 0.01
    assert abs(noise.var().item() - torch.pi**2 / 6) < 0.02
    uniform = torch.exp(-torch.exp(-noise)).flatten()
    counts = torch.histc(uniform, 100, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 148.2  # 99.9 %, 99 degrees of freedom


def test_large_noise_is_as_frequent_as_gumbels():
    """Test the largest 400 of 2^26 draws. `refrain bench sampling` tests 2^32 draws."""
    num_beyond, largest = tail(2**26, 400)
    assert abs(num_beyond - 400) < 3.3 * 20  # 99.9 %
    assert math.log(2**26) - 2.0 < largest < math.log(2**26) + 7.0


def neighbours(axis: str, num: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise, and the noise of the next key, position or token id."""
    keys, positions = torch.arange(num) * 2, torch.arange(num) % 7 * 2
    if axis == "token id":
        noise = gumbel_noise(keys, positions, 1001)
        return noise[:, :-1], noise[:, 1:]
    step = torch.ones(num, dtype=torch.int64)
    moved = {"key": (keys + step, positions), "position": (keys, positions + step)}[axis]
    return gumbel_noise(keys, positions, 1000), gumbel_noise(*moved, 1000)


@pytest.mark.parametrize("axis", ["key", "position", "token id"])
def test_noise_of_neighbours_is_independent(axis):
    """A chi-square test over 20 x 20 classes, and the correlation of all values."""
    one, other = (noise.double().flatten() for noise in neighbours(axis))
    ranks = [(torch.exp(-torch.exp(-noise)) * 20).long().clamp(max=19) for noise in (one, other)]
    counts = torch.bincount(ranks[0] * 20 + ranks[1], minlength=400).double()
    expected = len(one) / 400
    assert ((counts - expected) ** 2 / expected).sum() < 490.0  # 99.9 %, 399 degrees of freedom
    both = torch.stack((one, other))
    assert abs(torch.corrcoef(both)[0, 1].item()) < 4 / len(one) ** 0.5
    assert (one == other).sum() < 10


def test_samples_are_fair_draws():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0])
    n = 40_000
    keys = torch.arange(n) * 2654435761
    tokens = perturbed_argmax(logits.expand(n, -1), keys, torch.full((n,), 9))
    counts = torch.bincount(tokens, minlength=5).double()
    expected = logits.double().softmax(-1) * n
    chi_square = ((counts - expected) ** 2 / expected.clamp(min=1e-6))[:4].sum()
    assert chi_square < 16.3  # 99.9 % of chi-square with 3 degrees of freedom
    assert counts[4] <= 2


def test_samples_at_successive_positions_are_independent():
    n = 20_000
    logits = torch.zeros(n, 4)
    tokens = perturbed_argmax(logits, keys_of(1).expand(n), torch.arange(n))
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).double()
    expected = (n - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7  # 99.9 %, 15 degrees of freedom


def test_truncated_tokens_are_never_drawn():
    logits = torch.full((1000, 8), float("-inf"))
    logits[:, 3] = -50.0
    assert (perturbed_argmax(logits, keys_of(1000), torch.arange(1000)) == 3).all()
