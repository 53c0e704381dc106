"""The learner on batches of several policy versions, and corrected for other policies' tokens."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from refrain.engines.learn.learner import Learner
from refrain.engines.learn.training_samples import StalenessError
from refrain.engines.store.tables import TRAINING
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import make_batch, on_policy

MakeConfig = Callable[..., TrainConfig]


def started(config: TrainConfig, staleness: int = 0, policy_version: int = 0) -> Learner:
    learner = Learner(TrainConfig.model_validate(config.model_dump() | {"staleness": staleness}))
    learner.restore(None)
    learner.policy_version = policy_version
    return learner


def change(batch: pa.Table, edit: Callable[[dict], dict]) -> pa.Table:
    return pa.Table.from_pylist([row | edit(row) for row in batch.to_pylist()], schema=TRAINING)


def spans(row: dict, num_stale: int, stale: int, fresh: int) -> dict:
    """Return the changes that defer a row: version `stale` generated its first tokens."""
    length = len(row["response_token_ids"])
    counts = [(stale, min(num_stale, length)), (fresh, length - min(num_stale, length))]
    return {
        "origin_step": fresh,
        "version_spans": [
            {"policy_version": version, "num_tokens": count} for version, count in counts if count
        ],
    }


def moved_one(config: TrainConfig, batch: pa.Table) -> Learner:
    """Return a pipelined learner that was at policy version 3 and has trained on the batch."""
    learner = started(config, 1, 3)
    learner.train_step(batch)
    return learner


def test_the_head_of_a_deferred_sample_is_trained_on_like_its_tail(make_config: MakeConfig) -> None:
    config = make_config(micro_batch_tokens=128)
    batch = make_batch(policy_version=3)
    deferred = change(batch, lambda row: spans(row, 4, 1, 3))
    fresh = change(batch, lambda row: spans(row, 4, 3, 3))
    first = moved_one(config, deferred)
    assert first.weights_buffer() == moved_one(config, fresh).weights_buffer()

    # Negative control: other log-probabilities in the head change the update.
    other = change(deferred, lambda row: {"inference_logprobs": later(row, 4, 0.3)})
    assert moved_one(config, other).weights_buffer() != first.weights_buffer()


def test_metrics_of_each_staleness_add_up(make_config: MakeConfig) -> None:
    batch = change(make_batch(policy_version=3), lambda row: spans(row, 4, 1, 3))
    shifted = change(batch, lambda row: {"inference_logprobs": later(row, 4, 0.3)})
    before, after = (started(make_config(), 1, 3).train_step(own) for own in (batch, shifted))
    stale, fresh = (after[f"staleness/{versions}/tokens"] for versions in (2, 0))
    num_stale = sum(min(4, len(row["response_token_ids"])) for row in batch.to_pylist())
    num_tokens = sum(len(row["response_token_ids"]) for row in batch.to_pylist())
    assert (stale, stale + fresh) == (pytest.approx(num_stale / num_tokens), pytest.approx(1.0))
    assert "staleness/1/tokens" not in after
    for figure, whole in (("k1", "mismatch/k1"), ("clipfrac", "actor/pg_clipfrac")):
        parts = stale * after[f"staleness/2/{figure}"] + fresh * after[f"staleness/0/{figure}"]
        assert parts == pytest.approx(after[whole], abs=1e-6)
    # Only the stale tokens were shifted.
    assert after["staleness/2/k1"] == pytest.approx(before["staleness/2/k1"] - 0.3, abs=1e-5)
    assert after["staleness/0/k1"] == before["staleness/0/k1"]
    assert after["actor/pg_clipfrac"] > 0.0


def later(row: dict, num_shifted: int, shift: float) -> list[float]:
    """Return the row's log-probabilities, lower by `shift` at the first tokens."""
    values = row["inference_logprobs"]
    return [value - shift * (at < num_shifted) for at, value in enumerate(values)]


def test_batch_without_signal_leaves_weights_unchanged(make_config: MakeConfig) -> None:
    learner = started(make_config({"overlong_filtering": True}), 1, 3)
    before = learner.weights_buffer()
    batch = change(make_batch(policy_version=3), lambda _: {"truncated": True})
    metrics = learner.train_step(batch)
    assert (metrics["actor/staleness_mean"], metrics["actor/overlong_samples"]) == (0.0, 1.0)
    assert metrics["critic/advantages/mean"] == 0.0
    assert "actor/pg_loss" not in metrics
    assert learner.weights_buffer() == before
    assert learner.policy_version == 4


def test_a_batch_of_failed_conversations_leaves_weights_unchanged(make_config: MakeConfig) -> None:
    learner = started(make_config(), 1, 3)
    before = learner.weights_buffer()
    empty = {"reward": 0.0, "left_out": True, "group_rewards": [], "group_lengths": []}
    assert learner.train_step(change(make_batch(policy_version=3), lambda _: empty)) == {}
    assert learner.weights_buffer() == before
    assert learner.policy_version == 4
    assert learner.canaries()


def test_a_sync_run_refuses_an_older_version(make_config: MakeConfig) -> None:
    learner = started(make_config(), policy_version=3)
    old = change(make_batch(policy_version=2), lambda _: {"origin_step": 4})
    before = learner.weights_buffer()
    with pytest.raises(StalenessError, match="versions 2 to 2; policy version 3 is trained on"):
        learner.train_step(old)
    assert learner.weights_buffer() == before
    metrics = started(make_config(), 1, 3).train_step(old)
    assert metrics["actor/staleness_mean"] == 1.0


def reference_update(learner: Learner, batch: pa.Table, cap: float) -> tuple[float, float, float]:
    """Return loss at the old policy, mean weight and truncated share, computed in numpy."""
    rows = batch.to_pylist()
    sequences = [row["prompt_token_ids"] + row["response_token_ids"] for row in rows]
    losses, ratios = [], []
    for row, values in zip(rows, learner.logprobs(sequences, 0.7), strict=True):
        old = values[len(row["prompt_token_ids"]) - 1 :].astype(float)
        ratio = np.exp(old - np.array(row["inference_logprobs"]))
        group = np.array(row["group_rewards"])
        advantage = (row["reward"] - group.mean()) / (group.std(ddof=1) + 1e-6)
        losses.extend(-advantage * np.minimum(ratio, cap))
        ratios.extend(ratio)
    weights = np.minimum(ratios, cap)
    return float(np.mean(losses)), float(weights.mean()), float(np.mean(np.array(ratios) > cap))


def test_tis_weighs_each_token_by_how_its_policy_differs(make_config: MakeConfig) -> None:
    learner = started(make_config({"tis_cap": 1.2}))
    batch = make_batch()
    loss, mean, truncated = reference_update(learner, batch, 1.2)
    metrics = learner.train_step(batch)
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["actor/tis_mean"] == pytest.approx(mean, abs=1e-4)
    assert metrics["actor/tis_truncated"] == pytest.approx(truncated, abs=1e-6)
    assert 0.1 < truncated < 0.9
    assert (metrics["actor/ratio_mean"], metrics["actor/ratio_max"]) == (1.0, 1.0)
    assert metrics["actor/rollout_logprob_diff"] > 0.01


def test_gspos_clip_acts_as_it_comes(make_config: MakeConfig) -> None:
    """With GSPO's four minibatches, the clip acts from the second one on. With one, never."""
    for given, acts in (({}, True), ({"minibatches_per_step": 1}, False)):
        learner = started(make_config({"type": "gspo"}, **given))
        batch = on_policy(make_batch(), learner, temperature=0.7)
        metrics = learner.train_step(batch)
        assert (metrics["actor/pg_clipfrac"] > 0.05) == acts
        assert (metrics["actor/ppo_kl"] != 0.0) == acts
        assert (metrics["actor/ratio_max"] != 1.0) == acts
