"""The learner on one process: updates, checkpoints, exports, canaries and skipped updates."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch

from refrain.engines.learn import training_state
from refrain.engines.learn.checkpoint import (
    MODEL_DIR,
    TRAINING_STATE_FILE,
    read_state,
)
from refrain.engines.learn.gradient import with_logprobs
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.minibatch import Share
from refrain.engines.learn.policy import PolicyModel
from refrain.schemas.config import TrainConfig
from tests.failing_disks import full_disk
from tests.learn.conftest import as_batch, make_batch, on_policy, started
from tests.learn.test_checkpoint import flip

MakeConfig = Callable[..., TrainConfig]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(learner.weights_buffer())


def assert_close(first: Learner, second: Learner, atol: float) -> None:
    torch.testing.assert_close(weights(first), weights(second), atol=atol, rtol=0.0)


def test_gradient_checkpointing_gives_the_same_update(make_config: MakeConfig) -> None:
    plain, recomputed = started(make_config()), started(make_config(gradient_checkpointing=True))
    plain.train_step(make_batch())
    recomputed.train_step(make_batch())
    assert_close(plain, recomputed, atol=1e-6)


def test_same_batch_and_seed_give_the_same_weights(make_config: MakeConfig) -> None:
    first, second = (started(make_config(minibatches_per_step=2)) for _ in range(2))
    batch = make_batch()
    shuffled = batch.take(np.random.default_rng(0).permutation(batch.num_rows))
    assert first.train_step(batch) == second.train_step(shuffled)
    assert first.weights_buffer() == second.weights_buffer()


def test_on_policy_the_ratio_starts_at_one(make_config: MakeConfig) -> None:
    learner = started(make_config())
    metrics = learner.train_step(on_policy(make_batch(), learner, temperature=0.7))
    assert metrics["actor/rollout_logprob_diff"] < 1e-5
    assert metrics["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_another_temperature_would_be_noticed(make_config: MakeConfig) -> None:
    """Negative control of the test above: another temperature shows in the metric."""
    learner = started(make_config())
    metrics = learner.train_step(on_policy(make_batch(), learner, temperature=1.0))
    assert metrics["actor/rollout_logprob_diff"] > 1e-2


def test_rewarded_responses_become_more_likely(make_config: MakeConfig) -> None:
    learner = started(make_config(warmup_steps=2, minibatches_per_step=2))
    rows = make_batch().to_pylist()
    for row in rows:
        row["reward"] = -1.0 if row["sample_index"] % 2 else 0.0
    batch = as_batch(rows)

    def margin() -> float:
        sequences = [row["prompt_token_ids"] + row["response_token_ids"] for row in rows]
        sums = [
            values[len(row["prompt_token_ids"]) - 1 :].mean()
            for row, values in zip(rows, learner.logprobs(sequences), strict=True)
        ]
        return float(np.mean(sums[0::2]) - np.mean(sums[1::2]))

    before = margin()
    rates = [
        learner.train_step(on_policy(batch, learner, temperature=0.7))["actor/lr"] for _ in range(3)
    ]
    assert margin() > before + 0.1
    assert rates == [1e-3, 1e-3, 1e-3]  # Two minibatches a step: warm-up ends in the first step.


def test_the_first_update_takes_no_pass_for_old_logprobs(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, scored = make_config({"tis_cap": 1.2}, minibatches_per_step=3), []

    def counted(policy: PolicyModel, share: Share, config: TrainConfig) -> Share:
        scored.append(share)
        return with_logprobs(policy, share, config)

    monkeypatch.setattr("refrain.engines.learn.gradient.with_logprobs", counted)
    fewer, every = started(config), started(config)
    metrics = fewer.train_step(make_batch())
    assert len(scored) == 2
    monkeypatch.setattr(
        "refrain.engines.learn.learner.with_old_logprobs",
        lambda policy, shares, config: [counted(policy, share, config) for share in shares],
    )
    assert every.train_step(make_batch()) == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert len(scored) == 2 + 3
    assert_close(fewer, every, atol=1e-6)


def test_kl_penalty_holds_the_policy_near_its_start(make_config: MakeConfig) -> None:
    free = started(make_config({"kl_coefficient": 1e-6}))
    held = started(make_config({"kl_coefficient": 10.0}))
    for version in range(4):
        batch = make_batch(policy_version=version)
        metrics = [learner.train_step(batch) for learner in (free, held)]
    assert 0.0 <= metrics[1]["actor/kl_loss"] < 0.5 * metrics[0]["actor/kl_loss"]


def test_resuming_continues_bit_for_bit(make_config: MakeConfig) -> None:
    config = make_config({"kl_coefficient": 0.01}, warmup_steps=5, minibatches_per_step=2)
    straight = started(config)
    for seed in range(2):
        straight.train_step(make_batch(seed, policy_version=seed))
    path = straight.save(2, {"epoch": 0, "position": 12})
    noise_then = torch.rand(3)
    expected = straight.train_step(make_batch(2, policy_version=2))
    torch.rand(7)
    resumed = started(config, path)
    state = read_state(path)
    assert (state.step, state.loader_state) == (2, {"epoch": 0, "position": 12})
    assert torch.rand(3).tolist() == noise_then.tolist()
    assert resumed.train_step(make_batch(2, policy_version=2)) == expected
    assert resumed.weights_buffer() == straight.weights_buffer()
    assert resumed.policy_version == straight.policy_version == 3


def test_a_learner_takes_no_weights_that_were_damaged(make_config: MakeConfig) -> None:
    """Flip a bit near the end of each file. In a weights file, this changes an exponent."""
    config = make_config()
    path = started(config).save(1, {})
    files = [path / name for name in read_state(path).file_bytes]
    assert {file.parent.name for file in files} >= {"training", "model"}
    for file in files:
        flip(file, 8 * file.stat().st_size - 2)
        with pytest.raises(ValueError, match=f"{file.name} is damaged: its SHA-256"):
            started(config, path)
        flip(file, 8 * file.stat().st_size - 2)
    started(config, path)


def test_full_disk_keeps_existing_checkpoints(make_config: MakeConfig) -> None:
    learner = started(make_config())
    learner.train_step(make_batch())
    first = learner.save(1, {})
    num_bytes = sum(read_state(first).file_bytes.values())
    said = r"No space left on device: checkpoint global_step_2 takes (\S+) bytes"
    with full_disk(num_bytes // 4), pytest.raises(OSError, match=said) as full:
        learner.save(2, {})
    (told,) = re.findall(said, str(full.value))
    assert int(told.replace(",", "")) == pytest.approx(num_bytes, rel=0.1)
    assert list(first.parent.iterdir()) == [first]


class RunsCode:
    """A pickle that calls `Path.touch` when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return Path.touch, (self.trace,)


def test_a_checkpoint_from_elsewhere_runs_no_code(make_config: MakeConfig, tmp_path: Path) -> None:
    learner = started(make_config())
    path, trace = learner.save(1, loader_state={}), tmp_path / "trace"
    file = path / TRAINING_STATE_FILE
    torch.save(training_state.read(file) | {"more": RunsCode(trace)}, file)
    with pytest.raises(ValueError, match=f"{TRAINING_STATE_FILE} is not what refrain writes"):
        training_state.read(file)
    assert not trace.exists()


def test_without_the_optimiser_the_continuation_differs(make_config: MakeConfig) -> None:
    """Negative control of `test_resuming_continues_bit_for_bit`: the weights are not enough."""
    straight = started(make_config())
    straight.train_step(make_batch(0))
    path = straight.save(1, {})
    config = make_config()
    model = config.model.model_copy(update={"path": path / MODEL_DIR})
    fresh = started(config.model_copy(update={"model": model}))
    assert fresh.weights_buffer() == straight.weights_buffer()
    for learner in (straight, fresh):
        learner.train_step(make_batch(1, policy_version=learner.policy_version))
    assert fresh.weights_buffer() != straight.weights_buffer()


def test_a_learner_keeps_as_many_checkpoints_as_it_is_told(make_config: MakeConfig) -> None:
    learner = started(make_config(keep_checkpoints=1))
    for step in (1, 2):
        path = learner.save(step, {})
    assert list(path.parent.iterdir()) == [path]


def test_canaries_are_the_trainers_own_logprobs(make_config: MakeConfig) -> None:
    learner = started(make_config())
    batch = make_batch()
    learner.train_step(batch)
    canaries = learner.canaries()
    assert len(canaries) == 3
    first = batch.to_pylist()[0]
    assert list(canaries[0].token_ids) == first["prompt_token_ids"] + first["response_token_ids"]
    for canary in canaries:
        assert len(canary.trainer_logprobs) == len(canary.token_ids) - 1
        direct = learner.logprobs([canary.token_ids])[0]
        np.testing.assert_allclose(canary.trainer_logprobs, direct, atol=1e-5)
    (given,) = learner.canaries([[5, 6, 7]])
    assert given.token_ids == (5, 6, 7)


def poisoned(batch: pa.Table, prompt_key: str) -> pa.Table:
    """Return the batch with NaN as one log-probability of the engine."""
    rows = batch.to_pylist()
    at = next(at for at, row in enumerate(rows) if row["prompt_key"] == prompt_key)
    rows[at]["inference_logprobs"][0] = float("nan")
    return pa.Table.from_pylist(rows, schema=batch.schema)


def test_an_update_that_is_not_finite_is_left_out_and_counted(make_config: MakeConfig) -> None:
    """The learner skips only the minibatch with NaN and trains on the other one."""
    learner = started(make_config(minibatches_per_step=2))
    before = learner.weights_buffer()
    metrics = learner.train_step(poisoned(make_batch(), "prompt0"))
    assert metrics["actor/skipped_updates"] == 1.0
    assert all(map(math.isfinite, metrics.values()))
    assert learner.weights_buffer() != before
    assert learner.train_step(make_batch(policy_version=1))["actor/skipped_updates"] == 0.0


def test_repeated_non_finite_updates_end_the_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refrain.engines.learn.learner.MAX_SKIPPED_UPDATES", 2)
    learner = started(make_config())
    before = learner.weights_buffer()
    for version in range(2):
        metrics = learner.train_step(poisoned(make_batch(policy_version=version), "prompt0"))
        assert metrics["actor/skipped_updates"] == 1.0
    with pytest.raises(FloatingPointError, match=r"update 3 in a row.*at most 2 may be"):
        learner.train_step(poisoned(make_batch(policy_version=2), "prompt0"))
    assert learner.weights_buffer() == before


def test_a_good_update_forgets_the_bad_ones(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refrain.engines.learn.learner.MAX_SKIPPED_UPDATES", 1)
    learner = started(make_config())
    for version in range(4):
        batch = make_batch(policy_version=version)
        learner.train_step(poisoned(batch, "prompt0") if version % 2 else batch)


def test_a_ratio_beyond_any_exponent_trains_on(make_config: MakeConfig) -> None:
    """At log-ratios of about +1000 and -1000, exp overflows or gives 0."""
    learner = started(make_config({"kl_coefficient": 0.1, "dual_clip": 3.0}))
    rows = make_batch().to_pylist()
    for row in rows:
        row["inference_logprobs"] = [-1000.0 if row["sample_index"] % 2 else 900.0] * len(
            row["inference_logprobs"]
        )
    metrics = learner.train_step(as_batch(rows))
    assert metrics["actor/skipped_updates"] == 0.0
    assert all(map(math.isfinite, metrics.values()))


def test_a_micro_batch_must_hold_a_longest_sample(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"micro_batch_tokens \(63\) is below"):
        Learner(make_config(micro_batch_tokens=63))
