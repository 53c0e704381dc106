"""The learner on batches of several policy versions, and with the loss of each algorithm."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch

from engines.learn import gradient
from engines.learn.learner import Learner
from engines.learn.training_samples import StalenessError
from engines.store.tables import TRAINING
from schemas.algorithm import SETTINGS
from schemas.config import TrainConfig
from tests.learn.conftest import as_batch, make_batch, on_policy

MakeConfig = Callable[..., TrainConfig]


def started(config: TrainConfig, mode: str = "sync", policy_version: int = 0) -> Learner:
    learner = Learner(TrainConfig.model_validate(config.model_dump() | {"mode": mode}))
    learner.restore(None)
    learner.policy_version = policy_version
    return learner


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(learner.weights_buffer())


def assert_close(first: Learner, second: Learner, atol: float = 1e-6) -> None:
    torch.testing.assert_close(weights(first), weights(second), atol=atol, rtol=0.0)


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
    learner = started(config, "pipelined", 3)
    learner.train_step(batch)
    return learner


def reference_loss(learner: Learner, rows: list[dict], aggregation: str, ratio: str) -> float:
    """Return the loss over all tokens, computed in numpy, with a clip of 0.2 on both sides."""
    sequences = [row["prompt_token_ids"] + row["response_token_ids"] for row in rows]
    losses = []
    for row, values in zip(rows, learner.logprobs(sequences, 0.7), strict=True):
        new = values[len(row["prompt_token_ids"]) - 1 :].astype(float)
        log_ratios = new - np.array(row["inference_logprobs"])
        if ratio == "sequence":
            log_ratios = np.full(len(log_ratios), log_ratios.mean())
        group = np.array(row["group_rewards"])
        advantage = (row["reward"] - group.mean()) / (group.std(ddof=1) + 1e-6)
        unclipped, clipped = np.exp(log_ratios), np.exp(log_ratios).clip(0.8, 1.2)
        losses.append(-np.minimum(unclipped * advantage, clipped * advantage))
    if aggregation == "token_mean":
        return float(np.concatenate(losses).mean())
    if aggregation == "sequence_mean":
        return float(np.mean([own.mean() for own in losses]))
    return float(np.mean([own.sum() / 32 for own in losses]))


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_the_loss_equals_one_in_numpy(
    make_config: MakeConfig, aggregation: str, ratio: str
) -> None:
    algorithm = {"loss_aggregation": aggregation, "importance_ratio": ratio, "tis_cap": None}
    learner = started(make_config(algorithm, micro_batch_tokens=128), "pipelined", 3)
    batch = change(make_batch(policy_version=3), lambda row: spans(row, 4, 1, 3))
    expected = reference_loss(learner, batch.to_pylist(), aggregation, ratio)
    metrics = learner.train_step(batch)
    assert metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-3)
    assert 0.0 < metrics["actor/staleness_mean"] < 1.0


@pytest.mark.parametrize("algorithm", [{}, {"type": "gspo"}, {"tis_cap": None}])
def test_the_head_of_a_deferred_sample_is_trained_on_like_its_tail(
    make_config: MakeConfig, algorithm: dict
) -> None:
    config = make_config(algorithm, micro_batch_tokens=128)
    batch = make_batch(policy_version=3)
    deferred = change(batch, lambda row: spans(row, 4, 1, 3))
    fresh = change(batch, lambda row: spans(row, 4, 3, 3))
    first = moved_one(config, deferred)
    assert first.weights_buffer() == moved_one(config, fresh).weights_buffer()

    def shift(row: dict) -> dict:
        return {
            "inference_logprobs": [
                value - 0.3 if at < 4 else value
                for at, value in enumerate(row["inference_logprobs"])
            ]
        }

    # Negative control: other log-probabilities in the head change the update.
    assert moved_one(config, change(deferred, shift)).weights_buffer() != first.weights_buffer()


def of_two_policies(older: Learner, newer: Learner, head: int) -> pa.Table:
    """Return deferred samples. One policy generated the first `head` tokens, another the rest."""
    batch = make_batch(policy_version=3)
    by_older, by_newer = (
        on_policy(batch, learner, 0.7)["inference_logprobs"].to_pylist()
        for learner in (older, newer)
    )
    rows = batch.to_pylist()
    for row, old, new in zip(rows, by_older, by_newer, strict=True):
        row |= {"inference_logprobs": old[:head] + new[head:]} | spans(row, head, 1, 3)
    return pa.Table.from_pylist(rows, schema=TRAINING)


def test_each_token_is_weighed_by_the_policy_that_generated_it(make_config: MakeConfig) -> None:
    """Truncated importance sampling weighs the head of a deferred sample by the older policy's
    log-probabilities. The tail is on policy, so its weights are 1."""
    config = make_config({"tis_cap": 2.0}, learning_rate=1e-2)
    older, newer = started(config), started(config, "pipelined", 3)
    older.train_step(make_batch(seed=5))
    batch = of_two_policies(older, newer, head=4)
    loss, mean, _ = reference_update(newer, batch, 2.0)
    _, as_if_fresh, _ = reference_update(newer, of_two_policies(newer, newer, head=4), 2.0)
    assert abs(mean - as_if_fresh) > 1e-2
    metrics = newer.train_step(batch)
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["actor/tis_mean"] == pytest.approx(mean, abs=1e-4)


def test_a_token_older_than_its_samples_own_step_admits_is_refused(make_config: MakeConfig) -> None:
    learner = started(make_config(), "pipelined", 3)
    before = learner.weights_buffer()
    batch = change(make_batch(policy_version=3), lambda row: spans(row, 4, 0, 3))
    with pytest.raises(StalenessError, match="has tokens of policy versions 0 to"):
        learner.train_step(batch)
    assert learner.weights_buffer() == before


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_filtered_responses_are_in_no_denominator(
    make_config: MakeConfig, aggregation: str
) -> None:
    """DAPO's overlong filtering treats truncated responses as if they were not in the batch."""
    filtering = {"loss_aggregation": aggregation, "overlong_filtering": True}
    batch = make_batch(policy_version=3)
    cut = change(batch, lambda row: {"truncated": row["prompt_key"] == "prompt1"})
    kept = batch.filter(np.array(batch["prompt_key"]) != "prompt1")
    learner = moved_one(make_config(filtering), cut)
    assert_close(learner, moved_one(make_config(filtering), kept))
    # Negative control: without the setting, they change the update.
    plain = moved_one(make_config({"loss_aggregation": aggregation}), cut)
    assert plain.weights_buffer() != learner.weights_buffer()


def test_batch_without_signal_leaves_weights_unchanged(make_config: MakeConfig) -> None:
    learner = started(make_config({"overlong_filtering": True}), "pipelined", 3)
    before = learner.weights_buffer()
    batch = change(make_batch(policy_version=3), lambda _: {"truncated": True})
    metrics = learner.train_step(batch)
    assert (metrics["actor/staleness_mean"], metrics["actor/overlong_samples"]) == (0.0, 1.0)
    assert metrics["critic/advantages/mean"] == 0.0
    assert "actor/pg_loss" not in metrics
    assert learner.weights_buffer() == before
    assert learner.policy_version == 4


def test_a_sync_run_refuses_an_older_version(make_config: MakeConfig) -> None:
    learner = started(make_config(), policy_version=3)
    old = change(make_batch(policy_version=2), lambda _: {"origin_step": 4})
    with pytest.raises(StalenessError, match="versions 2 to 2; policy version 3 is trained on"):
        learner.train_step(old)
    metrics = started(make_config(), "pipelined", 3).train_step(old)
    assert metrics["actor/staleness_mean"] == 1.0


def test_equal_groups_are_in_no_denominator(make_config: MakeConfig) -> None:
    config = make_config({"type": "dapo", "kl_coefficient": 0.1}, minibatches_per_step=1)
    rows = make_batch(policy_version=3).to_pylist()
    for row in rows:
        if row["prompt_key"] == "prompt1":
            row["reward"] = 0.5
    batch = as_batch(rows, 3)
    kept = batch.filter(np.array(batch["prompt_key"]) != "prompt1")
    assert_close(moved_one(config, batch), moved_one(config, kept))


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


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_tis_weighs_each_token_by_how_its_policy_differs(
    make_config: MakeConfig, ratio: str
) -> None:
    learner = started(make_config({"tis_cap": 1.2, "importance_ratio": ratio}))
    batch = make_batch()
    loss, mean, truncated = reference_update(learner, batch, 1.2)
    metrics = learner.train_step(batch)
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["actor/tis_mean"] == pytest.approx(mean, abs=1e-4)
    assert metrics["actor/tis_truncated"] == pytest.approx(truncated, abs=1e-6)
    assert 0.1 < truncated < 0.9
    assert (metrics["actor/ratio_mean"], metrics["actor/ratio_max"]) == (1.0, 1.0)
    assert metrics["actor/rollout_logprob_diff"] > 0.01


def test_on_policy_tis_changes_nothing(make_config: MakeConfig) -> None:
    plain, corrected = started(make_config()), started(make_config({"tis_cap": 2.0}))
    batch = on_policy(make_batch(), plain, temperature=0.7)
    plain.train_step(batch)
    metrics = corrected.train_step(batch)
    assert_close(plain, corrected, atol=2e-5)
    assert metrics["actor/tis_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["actor/tis_truncated"] == 0.0


def test_later_minibatches_stay_near_the_old_policy(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config({"tis_cap": 2.0}, minibatches_per_step=3, learning_rate=1e-2)
    learner = started(config)
    batch = make_batch()
    rows = batch.to_pylist()
    sequences = [row["prompt_token_ids"] + row["response_token_ids"] for row in rows]
    before = learner.logprobs(sequences, 0.7)
    expected = {
        tuple(sequence): values[len(row["prompt_token_ids"]) - 1 :]
        for row, sequence, values in zip(rows, sequences, before, strict=True)
    }
    seen: list[gradient.Share] = []
    accumulate = gradient.accumulate_gradient

    def watch(policy, reference, share, objective, world_size):
        seen.append(share)
        return accumulate(policy, reference, share, objective, world_size)

    monkeypatch.setattr("engines.learn.learner.accumulate_gradient", watch)
    metrics = learner.train_step(batch)
    assert len(seen) == 3
    for share in seen:
        assert share.old_logprobs is not None
        for sequence, values in zip(share.sequences, share.old_logprobs, strict=True):
            own = expected[tuple(sequence.token_ids.tolist())]
            np.testing.assert_allclose(values, own, atol=1e-5)
    assert metrics["actor/ratio_max"] > 1.01  # The ratio is to the policy before the step.


def test_gspos_clip_acts_as_it_comes(make_config: MakeConfig) -> None:
    """With GSPO's four minibatches, the clip acts from the second one on. With one, never."""
    for given, acts in (({}, True), ({"minibatches_per_step": 1}, False)):
        learner = started(make_config({"type": "gspo"}, **given))
        batch = on_policy(make_batch(), learner, temperature=0.7)
        metrics = learner.train_step(batch)
        assert (metrics["actor/pg_clipfrac"] > 0.05) == acts
        assert (metrics["actor/ppo_kl"] != 0.0) == acts
        assert (metrics["actor/ratio_max"] != 1.0) == acts


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"grpo"}))
def test_every_algorithm_learns_and_is_cut_alike(make_config: MakeConfig, name: str) -> None:
    algorithm = {"type": name, "kl_coefficient": 0.1}
    whole = started(make_config(algorithm, micro_batch_tokens=8192, minibatches_per_step=2))
    pieces = started(make_config(algorithm, micro_batch_tokens=64, minibatches_per_step=2))
    before = weights(whole)
    batch = on_policy(make_batch(), whole, temperature=0.7)
    one, many = whole.train_step(batch), pieces.train_step(batch)
    assert one == pytest.approx(many, abs=2e-3)
    moved = max((before[key] - after).abs().max() for key, after in weights(whole).items())
    assert moved > 1e-4
    assert max((weights(pieces)[k] - v).abs().max() for k, v in weights(whole).items()) < moved / 5
