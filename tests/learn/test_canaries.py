"""Long canaries are long enough for the model's features, do not repeat, and are due rarely."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from refrain.engines.learn.canaries import BEYOND_TOKENS, LONG_TOKENS, TRAINED_TOKENS, LongCanaries
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.rollouts import read_rollouts
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import VOCAB_SIZE, make_batch, started

MakeConfig = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    ("model", "longest"),
    [
        ({}, LONG_TOKENS),
        ({"sliding_window": 512, "max_position_embeddings": 131072}, LONG_TOKENS),
        ({"sliding_window": 8192}, 8192),
        ({"attention_chunk_size": 8192, "use_cache": True}, 8192),
        ({"rope_parameters": {"original_max_position_embeddings": 16384}}, 16384),
        ({"rope_scaling": {"full": {"original_max_position_embeddings": 5000}}}, 5000),
        ({"windows": [None, 6000], "window_type": "full", "is_chunked": True}, 6000),
    ],
)
def test_canary_exceeds_the_configured_lengths(model: dict[str, Any], longest: int) -> None:
    assert LongCanaries(model, 10**6).num_tokens == longest + BEYOND_TOKENS
    # An engine needs room for the token that it generates, too.
    assert LongCanaries(model, 1000).num_tokens == 999


def test_short_text_continues_without_repeats() -> None:
    given = np.random.default_rng(1).integers(1000, size=(3, 50)).tolist()
    long, behind = LongCanaries({}, 1000).take(given)
    assert (len(long), len(behind)) == (999, 128)
    assert long[:150].tolist() == given[0] + given[1] + given[2]
    for shift in range(1, 900):
        assert (long[shift:] == long[:-shift]).mean() < 0.1
    again, _ = LongCanaries({}, 1000).take(given)
    assert again.tolist() == long.tolist(), "ranks must take the same canary"


def test_canaries_are_due_rarely_after_the_start() -> None:
    rollouts = read_rollouts(make_batch())
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    canaries = LongCanaries({}, max_model_len=64)
    assert canaries.take() == [], "there must be no canary before there is text"
    assert canaries.take([[5, 6, 7]])
    trained, taken_after = 0, []
    for _ in range(100):
        canaries.train_on(rollouts)
        trained += num_tokens
        if canaries.take():
            taken_after.append(trained)
            trained = 0
    assert len(taken_after) > 1
    for tokens in taken_after:
        assert tokens >= TRAINED_TOKENS * 63 > tokens - num_tokens
    assert LongCanaries({}, max_model_len=2).take([[5, 6, 7]]) == []


@pytest.mark.parametrize("micro_batch_tokens", [64, 100, 256])
def test_canary_follows_a_long_one_in_its_row(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, micro_batch_tokens: int
) -> None:
    learner = started(make_config(micro_batch_tokens=micro_batch_tokens))
    given = np.random.default_rng(0).integers(VOCAB_SIZE, size=(4, 30)).tolist()
    rows: list[tuple[int, ...]] = []
    score = PolicyModel.score

    def watch(policy: PolicyModel, batch: Any, temperature: float) -> Any:
        rows.append(batch.num_tokens)
        return score(policy, batch, temperature)

    monkeypatch.setattr(PolicyModel, "score", watch)
    long, behind = learner.long_canaries(given)
    assert len(long.token_ids) == 63
    shared = [row for row in rows if len(row) == 2]
    assert len(shared) == 2, "expected one row in float32 and one in the engines' data type"
    for row in shared:
        assert row[0] >= row[1] == len(behind.token_ids) - 1 >= 31
    for canary in (long, behind):
        (alone,) = learner.logprobs([canary.token_ids])
        np.testing.assert_allclose(canary.trainer_logprobs, alone, atol=1e-5)
    assert learner.long_canaries() == (), "no canary is due yet"
