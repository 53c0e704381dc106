"""Packing: micro-batches fit their budget, and packed samples score as each one alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.packing import TokenSequence, lay_out, pack, plan_micro_batches
from refrain.engines.learn.policy import PolicyModel
from tests.learn.conftest import own_logprobs

LENGTHS = [(3, 5), (1, 1), (20, 60), (7, 1), (2, 30), (9, 11), (30, 90)]


def make_sequences(seed: int = 0) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    return [
        TokenSequence(rng.integers(64, size=sum(lengths)).astype(np.int32), lengths[0])
        for lengths in LENGTHS
    ]


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> PolicyModel:
    return load_policy(model_dir, Loading(torch.device("cpu")))


@pytest.fixture(scope="module")
def original(model_dir: Path) -> PreTrainedModel:
    """Return the same model as Hugging Face loads it."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def unpacked_logprobs(original: PreTrainedModel, sequence: TokenSequence) -> torch.Tensor:
    """Return log-probabilities of the response by Hugging Face's forward, the sequence alone."""
    values = own_logprobs(original, sequence.token_ids, 0.7)
    return torch.from_numpy(values[sequence.num_prompt_tokens - 1 :])


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
    st.integers(300, 2000),
)
def test_every_sample_lies_in_exactly_one_micro_batch_that_has_room(
    num_tokens: list[int], budget: int
) -> None:
    plans = plan_micro_batches(num_tokens, budget)
    assert sorted(sample for own in plans for sample in own) == list(range(len(num_tokens)))
    for own in plans:
        lengths = [num_tokens[sample] for sample in own]
        assert lengths == sorted(lengths, reverse=True)
        assert 0 < sum(lengths) <= budget


def test_a_sample_beyond_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into a row of 100: raise trainer"):
        plan_micro_batches([5, 101], 100)


@torch.no_grad()
@pytest.mark.parametrize("budget", [120, 256, 4096])
def test_packed_logprobs_equal_unpacked_ones(
    policy: PolicyModel, original: PreTrainedModel, budget: int
) -> None:
    sequences = make_sequences()
    for batch in pack(sequences, budget):
        packed = policy.score(batch, temperature=0.7)
        expected = torch.cat([unpacked_logprobs(original, sequences[s]) for s in batch.samples])
        torch.testing.assert_close(packed.logprobs, expected, atol=1e-5, rtol=0.0)


@torch.no_grad()
def test_as_one_sample_they_see_each_other(policy: PolicyModel, original: PreTrainedModel) -> None:
    """Negative control of the test above: two samples joined into one get other scores."""
    sequences = make_sequences()
    batch = lay_out([4, 0], sequences)
    num_tokens = sum(batch.num_tokens)
    joined = replace(batch, num_tokens=(num_tokens,), position_ids=np.arange(num_tokens))
    packed = policy.score(joined, temperature=0.7).logprobs
    expected = torch.cat([unpacked_logprobs(original, sequences[s]) for s in (4, 0)])
    assert (packed - expected).abs().max() > 1e-2


@torch.no_grad()
def test_entropy_is_that_of_the_sampling_distribution(
    policy: PolicyModel, original: PreTrainedModel
) -> None:
    sequence = make_sequences()[0]
    ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
    logits = original(input_ids=ids).logits[0, sequence.num_prompt_tokens - 1 : -1] / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()
    entropies = policy.score(pack([sequence], 256)[0], temperature=0.7).entropies
    torch.testing.assert_close(entropies, expected, atol=1e-5, rtol=0.0)


def test_chunked_head_gives_the_same_scores_and_gradients(
    policy: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pack(make_sequences(), 4096)[0]

    def score_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        policy.zero_grad()
        logprobs = policy.score(batch, temperature=0.7).logprobs
        logprobs.sum().backward()
        gradient = policy.model.get_input_embeddings().weight.grad
        return logprobs.detach(), gradient.clone()

    whole = score_and_gradient()
    monkeypatch.setattr("refrain.engines.learn.policy.MAX_LOGITS", 64 * 16)
    torch.testing.assert_close(score_and_gradient(), whole, atol=1e-3, rtol=1e-4)
