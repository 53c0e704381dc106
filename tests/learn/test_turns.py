"""Conversations in the trainer: it predicts sampled tokens, and observed ones are context."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from refrain.engines.learn.gradient import accumulate_gradient, with_logprobs
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.minibatch import assign_share
from refrain.engines.learn.packing import TokenSequence, lay_out, pack
from refrain.engines.learn.policy import PolicyModel, score_sequences
from refrain.engines.learn.rollouts import ScoredRollout, read_rollouts
from refrain.engines.learn.training_samples import TrainingSample, read_training_samples
from refrain.engines.store.tables import TRAINING
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import as_batch, make_batch, own_logprobs, started

MakeConfig = Callable[..., TrainConfig]
Turns = Sequence[tuple[int, int | None]]
CONVERSATIONS: list[Turns] = [
    [(5, 7), (1, 3), (9, None)],
    [(1, 20), (1, None)],
    [(30, None)],
    [(2, 1), (2, 1), (2, 1), (2, 4)],
    [(12, 0), (3, 9), (6, None)],
]
"""Sampled and observed tokens of each turn. One ends with an observation."""
TEMPERATURE = 0.7


def mask_of(turns: Turns) -> np.ndarray:
    sides = [[True] * sampled + [False] * (observed or 0) for sampled, observed in turns]
    return np.array([side for own in sides for side in own])


def make_sequences(seed: int = 0) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    return [
        TokenSequence(rng.integers(64, size=4 + len(mask)).astype(np.int32), 4, sampled=mask)
        for mask in map(mask_of, CONVERSATIONS)
    ]


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> PolicyModel:
    return load_policy(model_dir, Loading(torch.device("cpu")))


@pytest.fixture(scope="module")
def original(model_dir: Path) -> PreTrainedModel:
    """Return the same model as Hugging Face loads it."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def plain_logprobs(original: PreTrainedModel, sequence: TokenSequence) -> np.ndarray:
    """Return Hugging Face's log-probabilities of the sampled tokens, the sequence alone."""
    assert sequence.sampled is not None
    after_prompt = own_logprobs(original, sequence.token_ids, TEMPERATURE)[3:]
    return after_prompt[sequence.sampled]


def padded_logprobs(
    original: PreTrainedModel, sequences: Sequence[TokenSequence]
) -> list[np.ndarray]:
    """Return Hugging Face's log-probabilities of the sampled tokens, all in one padded batch."""
    texts = [torch.from_numpy(one.token_ids.astype(np.int64)) for one in sequences]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    seen = torch.nn.utils.rnn.pad_sequence(list(map(torch.ones_like, texts)), batch_first=True)
    logits = original(input_ids=ids, attention_mask=seen, use_cache=False).logits / TEMPERATURE
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return [
        row[3 : len(one.token_ids) - 1].numpy()[one.sampled]
        for row, one in zip(logprobs, sequences, strict=True)
    ]


# Log-probabilities


@torch.no_grad()
@pytest.mark.parametrize("budget", [64, 100, 4096])
def test_logprobs_are_those_of_a_plain_forward_pass(
    policy: PolicyModel, original: PreTrainedModel, budget: int
) -> None:
    sequences = make_sequences()
    found = score_sequences(policy, sequences, budget, TEMPERATURE)
    padded = padded_logprobs(original, sequences)
    for one, own, row in zip(sequences, found, padded, strict=True):
        np.testing.assert_allclose(own, plain_logprobs(original, one), atol=1e-5, rtol=0.0)
        np.testing.assert_allclose(own, row, atol=1e-5, rtol=0.0)


@torch.no_grad()
def test_observations_change_what_follows(policy: PolicyModel) -> None:
    """Negative control of the test above: with other observed tokens, the sampled tokens before
    keep their scores and those after get others."""
    (sequence, *_) = make_sequences()
    token_ids = sequence.token_ids.copy()
    token_ids[4 + 5] = (token_ids[4 + 5] + 1) % 64
    other = replace(sequence, token_ids=token_ids)
    own, changed = score_sequences(policy, [sequence, other], 256, TEMPERATURE)
    np.testing.assert_allclose(own[:5], changed[:5], atol=1e-5, rtol=0.0)
    assert np.abs(own[5:] - changed[5:]).max() > 1e-2


conversations = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5)


@settings(max_examples=20, deadline=None)
@given(st.lists(conversations, min_size=1, max_size=4), st.integers(40, 200), st.integers(0, 99))
def test_logprobs_of_any_conversations_are_those_of_a_plain_forward_pass(
    policy: PolicyModel, original: PreTrainedModel, given: list[Turns], budget: int, seed: int
) -> None:
    rng, masks = np.random.default_rng(seed), list(map(mask_of, given))
    sequences = [
        TokenSequence(rng.integers(64, size=4 + len(mask)).astype(np.int32), 4, sampled=mask)
        for mask in masks
    ]
    longest = max(one.num_input_tokens for one in sequences)
    found = score_sequences(policy, sequences, max(budget, longest), TEMPERATURE)
    for one, own in zip(sequences, found, strict=True):
        np.testing.assert_allclose(own, plain_logprobs(original, one), atol=1e-5, rtol=0.0)


@given(st.lists(conversations, min_size=1, max_size=6), st.integers(1, 4))
def test_every_sampled_token_is_predicted_once_from_the_token_before(
    given: list[Turns], num_prompt_tokens: int
) -> None:
    sequences, first = [], 0
    for mask in map(mask_of, given):
        ids = np.arange(first, first := first + num_prompt_tokens + len(mask), dtype=np.int32)
        sequences.append(TokenSequence(ids, num_prompt_tokens, sampled=mask))
    predicted = []
    for batch in pack(sequences, 150):
        # Each token of this test is the one before it plus 1.
        assert (batch.input_ids[batch.predict_at] + 1 == batch.targets).all()
        predicted += batch.targets.tolist()
        num_predicted = [sequences[sample].num_response_tokens for sample in batch.samples]
        assert len(batch.targets) == sum(num_predicted)
    sampled = [one.token_ids[one.num_prompt_tokens :][one.sampled] for one in sequences]
    assert sorted(predicted) == np.concatenate(sampled).tolist()


@pytest.mark.parametrize("mask", [[True], [True, False, True, True], [False, False, False]])
def test_a_mask_that_does_not_fit_is_a_bug(mask: list[bool]) -> None:
    with pytest.raises(AssertionError):
        pack([TokenSequence(np.arange(5, dtype=np.int32), 2, sampled=np.array(mask))], 64)


# Gradients


def gradient_of(policy: PolicyModel, sequences: Sequence[TokenSequence]) -> dict[str, Tensor]:
    """Return the gradient of the sum of all log-probabilities."""
    policy.zero_grad()
    for batch in pack(sequences, 100):
        policy.score(batch, TEMPERATURE).logprobs.sum().backward()
    return {name: one.grad.clone() for name, one in policy.model.named_parameters()}


def test_an_observed_tokens_own_prediction_has_no_gradient(
    policy: PolicyModel, original: PreTrainedModel
) -> None:
    sequences = make_sequences()
    found = gradient_of(policy, sequences)
    original.zero_grad()
    for one in sequences:
        ids = torch.from_numpy(one.token_ids.astype(np.int64))
        logprobs = (original(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        chosen = logprobs[3:-1].gather(-1, ids[4:, None])[:, 0]
        chosen[torch.from_numpy(one.sampled)].sum().backward()
    expected = {name: one.grad for name, one in original.named_parameters()}
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    all_sampled = [replace(one, sampled=np.ones_like(one.sampled)) for one in sequences]
    other = gradient_of(policy, all_sampled)
    assert all((found[name] - other[name]).abs().max() > 1e-2 for name in found)


def test_a_token_after_the_last_sampled_one_has_no_gradient(policy: PolicyModel) -> None:
    """An observation at the end changes nothing. Its row of the embeddings is not used."""
    ids = np.array([1, 2, 3, 4, 5, 50, 51], np.int32)
    ended = TokenSequence(ids, 2, sampled=np.array([True, False, True, False, False]))
    cut = TokenSequence(ids[:5], 2, sampled=np.array([True, False, True]))
    torch.testing.assert_close(gradient_of(policy, [ended]), gradient_of(policy, [cut]))


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"loss_aggregation": "sequence_mean"},
        {"loss_aggregation": "fixed_length"},
        {"type": "gspo"},
        {"tis_cap": 2.0, "entropy_coefficient": 0.01},
    ],
)
def test_the_loss_is_that_of_observed_tokens_that_do_not_count(
    policy: PolicyModel, make_config: MakeConfig, algorithm: dict
) -> None:
    """The other way: predict all tokens and leave the observed ones out of the loss."""
    config = make_config(algorithm)
    turned = read_training_samples(read_rollouts(conversation_batch()), config, 0)[0]
    found, expected = (
        update_of(policy, samples, config) for samples in (turned, list(map(unmasked, turned)))
    )
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-3)


def unmasked(sample: TrainingSample) -> TrainingSample:
    """Return the sample as if all tokens were sampled, and the observed ones did not count."""
    rollout, mask = sample.rollout, sample.rollout.sampled
    assert mask is not None
    logprobs, versions = np.full(len(mask), -50.0, np.float32), np.zeros(len(mask), np.int32)
    logprobs[mask] = rollout.inference_logprobs
    whole = replace(rollout, sampled=None, inference_logprobs=logprobs, versions=versions)
    return replace(sample, rollout=whole, counted=mask.copy())


def update_of(
    policy: PolicyModel, samples: list[TrainingSample], config: TrainConfig
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return gradient and metrics of one minibatch."""
    share = with_logprobs(policy, assign_share(samples, config, 0, 1), config)
    policy.zero_grad()
    metrics = accumulate_gradient(policy, None, share, config, 1)
    return {name: one.grad.clone() for name, one in policy.model.named_parameters()}, metrics


def conversation_batch() -> pa.Table:
    """Return a batch of conversations of two prompts."""
    rng, rows = np.random.default_rng(1), []
    for at, turns in enumerate(CONVERSATIONS):
        mask = mask_of(turns)
        rows.append(
            {
                "prompt_key": f"prompt{at % 2}",
                "sample_index": at,
                "prompt_token_ids": [1, 2, 3, 4],
                "response_token_ids": rng.integers(64, size=len(mask)).tolist(),
                "inference_logprobs": rng.normal(-4.0, 0.3, mask.sum()).tolist(),
                "reward": float(rng.normal()),
            }
        )
    batch = as_batch(rows).to_pylist()
    for row, turns in zip(batch, CONVERSATIONS, strict=True):
        own = [{"num_sampled": sampled, "num_observed": observed} for sampled, observed in turns]
        (span,), num_sampled = row["version_spans"], int(mask_of(turns).sum())
        row |= {"turns": own, "version_spans": [span | {"num_tokens": num_sampled}]}
    lengths = {row["sample_index"]: row["version_spans"][0]["num_tokens"] for row in batch}
    for row in batch:
        group = [i for i in lengths if i % 2 == row["sample_index"] % 2]
        row["group_lengths"] = [lengths[i] for i in group]
    return pa.Table.from_pylist(batch, TRAINING)


def test_a_learner_trains_on_conversations(make_config: MakeConfig) -> None:
    learner, batch = started(make_config()), conversation_batch()
    before = learner.weights_buffer()
    metrics = learner.train_step(batch)
    assert metrics["actor/skipped_updates"] == 0.0
    assert metrics["actor/grad_norm"] > 0.0
    assert learner.weights_buffer() != before
    (first, *_) = read_rollouts(batch)
    assert first.token_ids[:128].tolist() in [list(one.token_ids) for one in learner.canaries()]


# Lengths


def test_lengths_are_sampled_tokens(make_config: MakeConfig) -> None:
    rollouts = read_rollouts(conversation_batch())
    num_sampled = [rollout.num_response_tokens for rollout in rollouts]
    assert sorted(num_sampled) == sorted(int(mask_of(turns).sum()) for turns in CONVERSATIONS)
    samples, _ = read_training_samples(rollouts, make_config(), 0)
    assert [len(sample.counted) for sample in samples] == num_sampled
    share = assign_share(samples, make_config({"loss_aggregation": "sequence_mean"}), 0, 1)
    own = [sample.rollout.num_response_tokens for sample in share.samples]
    weights = [1 / (len(samples) * num) for num in own]
    assert [one[0] for one in share.weights] == pytest.approx(weights)
    assert share.num_counted == sum(num_sampled)


def test_a_length_punishment_counts_sampled_tokens(make_config: MakeConfig) -> None:
    """One response of 32 tokens, of which 30 were observed, is short."""
    config = make_config({"overlong_buffer_tokens": 16})
    long, short = one_row([]), one_row([{"num_sampled": 2, "num_observed": 30}])
    rewards = [
        read_training_samples(read_rollouts(row), config, 0)[1]["critic/rewards/mean"]
        for row in (long, short)
    ]
    assert rewards == [1.0 - config.algorithm.overlong_penalty, 1.0]


def one_row(turns: list[dict]) -> pa.Table:
    """Return a response of 32 tokens with reward 1."""
    num_sampled = sum(turn["num_sampled"] for turn in turns) or 32
    row = {
        "prompt_key": "a",
        "sample_index": 0,
        "prompt_token_ids": [1],
        "response_token_ids": [5] * 32,
        "inference_logprobs": [-1.0] * num_sampled,
        "reward": 1.0,
    }
    (whole,) = as_batch([row]).to_pylist()
    spans = [{"policy_version": 0, "num_tokens": num_sampled}]
    changes = {"turns": turns, "version_spans": spans, "group_lengths": [num_sampled]}
    return pa.Table.from_pylist([whole | changes], TRAINING)


# Without turns


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99))
def test_a_mask_of_sampled_tokens_changes_no_array(seed: int) -> None:
    plain = read_rollouts(make_batch(seed))
    masked = [replace(one, sampled=np.ones(one.num_response_tokens, bool)) for one in plain]
    for without, having in zip(pack(plain, 100), pack(masked, 100), strict=True):
        for name in ("input_ids", "position_ids", "predict_at", "targets"):
            one, other = getattr(without, name), getattr(having, name)
            assert one.dtype == other.dtype
            assert one.tolist() == other.tolist()


def test_a_conversation_of_one_turn_trains_bit_for_bit_as_a_response(
    make_config: MakeConfig,
) -> None:
    rows = make_batch().to_pylist()
    turned = [
        row | {"turns": [{"num_sampled": len(row["response_token_ids"]), "num_observed": None}]}
        for row in rows
    ]
    results = []
    for own in (rows, turned):
        learner: Learner = started(make_config())
        metrics = learner.train_step(pa.Table.from_pylist(own, TRAINING))
        results.append((metrics, learner.weights_buffer()))
    assert results[0] == results[1]


def test_without_turns_all_tokens_after_the_prompt_are_predicted() -> None:
    sequences = [
        TokenSequence(np.arange(10, 16, dtype=np.int32), 2),
        TokenSequence(np.arange(20, 24, dtype=np.int32), 3),
    ]
    batch = lay_out([0, 1], sequences)
    assert batch.predict_at.tolist() == [1, 2, 3, 4, 7]
    assert batch.targets.tolist() == [12, 13, 14, 15, 23]
    rollouts: list[ScoredRollout] = read_rollouts(make_batch())
    assert all(rollout.sampled is None for rollout in rollouts)
