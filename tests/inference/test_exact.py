"""Exact sampling as arithmetic: fair, pure, and blind to drafts."""

from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.inference.sampling.exact import REJECTED, accept_exact, gumbel_noise, perturbed_argmax
from schemas.keys import sample_key


def _keys(n: int) -> torch.Tensor:
    return torch.tensor([sample_key(0, 1, "train", "p", i) for i in range(n)])


def test_noise_is_a_pure_function_of_its_arguments():
    keys, positions = _keys(64), torch.arange(64) * 7
    whole = gumbel_noise(keys, positions, 50)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(gumbel_noise(keys[order], positions[order], 50), whole[order])
    assert torch.equal(gumbel_noise(keys[3:4], positions[3:4], 50), whole[3:4])
    # A larger vocabulary (padding) leaves the noise of the first tokens as it was.
    assert torch.equal(gumbel_noise(keys, positions, 64)[:, :50], whole)


def test_noise_differs_by_key_position_and_token():
    noise = gumbel_noise(_keys(200), torch.arange(200), 200)
    assert noise.unique().numel() > 0.999 * noise.numel()
    same_key = gumbel_noise(_keys(1).expand(50), torch.arange(50), 50)
    assert same_key.unique().numel() == 2500


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(_keys(400), torch.arange(400), 500).double()
    assert abs(noise.mean().item() - 0.57722) < 0.01
    assert abs(noise.var().item() - torch.pi**2 / 6) < 0.02
    assert torch.isfinite(noise).all()


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
    keys = _keys(1).expand(n)
    tokens = perturbed_argmax(logits, keys, torch.arange(n))
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).double()
    expected = (n - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7  # 99.9 %, 15 degrees of freedom


def test_truncated_tokens_are_never_drawn():
    logits = torch.full((1000, 8), float("-inf"))
    logits[:, 3] = -50.0
    assert (perturbed_argmax(logits, _keys(1000), torch.arange(1000)) == 3).all()


def _emitted(sampled: list[int], drafts: list[int]) -> list[int]:
    """Brute force: verify one request's drafts one by one."""
    out = []
    for i, token in enumerate(sampled):
        out.append(token)
        if i == len(drafts) or drafts[i] != token:
            break
    return out


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.integers(0, 5).flatmap(
            lambda k: st.tuples(
                st.lists(st.integers(0, 2), min_size=k, max_size=k),
                st.lists(st.integers(0, 2), min_size=k + 1, max_size=k + 1),
            )
        ),
        min_size=1,
        max_size=6,
    )
)
def test_acceptance_equals_verification_one_by_one(requests):
    drafts = [d for d, _ in requests]
    sampled = [s for _, s in requests]
    tokens, rows = accept_exact(
        torch.tensor(list(chain(*sampled))),
        torch.tensor(list(chain(*drafts)), dtype=torch.int32),
        [len(d) for d in drafts],
    )
    flat = list(chain(*sampled))
    for i, (draft, sample) in enumerate(requests):
        kept = [t for t in tokens[i].tolist() if t != REJECTED]
        assert kept == _emitted(sample, draft)
        assert [flat[r] for r in rows[i].tolist()[: len(kept)]] == kept


def test_requests_without_drafts_emit_what_was_sampled():
    tokens, rows = accept_exact(torch.tensor([7, 8, 9]), torch.zeros(0, dtype=torch.int32), [0] * 3)
    assert tokens.tolist() == [[7], [8], [9]]
    assert rows.tolist() == [[0], [1], [2]]
