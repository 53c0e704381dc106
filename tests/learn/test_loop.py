"""Gradients, updates and metrics equal those of a plain loop over samples and tokens, `loop.py`."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from refrain.engines.learn.diagnostics import LOWS, PEAKS
from refrain.engines.learn.gradient import Reference, accumulate_gradient, clip_gradient
from refrain.engines.learn.learner import ADAM_BETA1, Learner
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.minibatch import Share, assign_share, cut_minibatches
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.rollouts import read_rollouts
from refrain.engines.learn.training_samples import TrainingSample, read_training_samples
from refrain.schemas.algorithm import SETTINGS
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import as_batch, make_batch
from tests.learn.loop import advantages_of, logprobs_of, minibatch_loss

MakeConfig = Callable[..., TrainConfig]
LOOSE = {"clip_low": 0.2, "clip_high": 0.3}
"""A clip range that holds some of the ratios in this batch, but not all."""
CASES: dict[str, dict[str, Any]] = {
    **{name: {"type": name} for name in SETTINGS},
    "asymmetric clip": {"clip_low": 0.1, "clip_high": 0.5},
    "dual clip": {"dual_clip": 1.5},
    "sequence ratio": {"type": "gspo", "tis_cap": None, **LOOSE},
    "kl": {"kl_coefficient": 0.2},
    "kl by k1": {"kl_coefficient": 0.2, "kl_estimator": "k1"},
    "kl by k2": {"kl_coefficient": 0.2, "kl_estimator": "k2"},
    "entropy bonus": {"entropy_coefficient": 0.3},
    "leave one out, by the batch": {"type": "rloo", "scale_rewards": "batch"},
    "overlong": {"overlong_buffer_tokens": 20, "overlong_penalty": 0.7},
    "tis": {"tis_cap": 1.2},
    "tis of sequences": {"tis_cap": 1.5, "tis_mode": "sequence_truncate"},
    "rejection": {"tis_cap": 1.3, "tis_mode": "token_mask"},
    "geometric mask": {"tis_cap": 1.02, "tis_mode": "geometric_mask"},
    "rejection of sequences": {"tis_cap": 4.0, "tis_mode": "sequence_mask"},
    "gspo, clipped": {"type": "gspo", "tis_cap": 1.2, "clip_low": 0.01, "clip_high": 0.02},
    "all at once": {
        "type": "dapo",
        "clip_low": 0.1,
        "dual_clip": 2.0,
        "tis_cap": 1.4,
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.05,
        "overlong_buffer_tokens": 20,
        "loss_aggregation": "sequence_mean",
    },
}
EQUAL = "prompt3"
"""Prompt with equal rewards. It is in the minibatch that the tests compare."""
LAYOUTS = [(1, 8192), (2, 64), (3, 96)]
"""Number of simulated ranks, and `micro_batch_tokens`."""


def perturbed(policy: PolicyModel, seed: int) -> PolicyModel:
    other, generator = deepcopy(policy), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.01 * noise)
    return other


@pytest.fixture(scope="module")
def start(model_dir: Path) -> PolicyModel:
    return load_policy(model_dir, Loading(torch.device("cpu")))


@pytest.fixture(scope="module")
def in_float64(model_dir: Path) -> Callable[[PolicyModel], Any]:
    """Return a function that copies a policy's weights into Hugging Face's model, in float64."""

    def convert(policy: PolicyModel) -> Any:
        model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
        model.load_state_dict(policy.model.state_dict())
        return model.double().eval()

    return convert


@pytest.fixture(scope="module")
def batch(start: PolicyModel, in_float64: Callable[[PolicyModel], Any]) -> pa.Table:
    """Return a batch whose engine was a policy close to the start, with noise added to its
    log-probabilities. Rewards are 0 or 1. One group has equal rewards."""
    rows, rng = make_batch(num_groups=6).to_pylist(), np.random.default_rng(5)
    engine = in_float64(perturbed(start, 7))
    for row in rows:
        with torch.no_grad():
            own, _ = logprobs_of(engine, row, 0.7)
        row["inference_logprobs"] = (own.numpy() + rng.normal(0, 0.1, len(own))).tolist()
        row["reward"] = float(row["prompt_key"] == EQUAL or rng.random() < 0.5)
    return as_batch(rows)


def rows_of(samples: Sequence[TrainingSample], batch: pa.Table) -> list[int]:
    """Return the row of each sample in the batch."""
    keys = {
        (row["prompt_key"], row["sample_index"]): at for at, row in enumerate(batch.to_pylist())
    }
    return [keys[one.rollout.prompt_key, one.rollout.sample_index] for one in samples]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by Hugging Face's names, with those of tied weights only once."""
    return {
        name: one.grad.detach().double().clone()
        for name, one in model.named_parameters()
        if one.grad is not None
    }


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    off = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return math.sqrt(off / sum(float(one.square().sum()) for one in expected.values()))


def update_of_ranks(
    policy: PolicyModel,
    reference: Reference | None,
    shares: Sequence[Share],
    config: TrainConfig,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return gradient and metrics of a minibatch. Compute the ranks' shares one by one."""
    policy.zero_grad()
    parts = [accumulate_gradient(policy, reference, share, config, 1) for share in shares]
    how = dict.fromkeys(PEAKS, max) | dict.fromkeys(LOWS, min)
    metrics = {name: how.get(name, sum)(part[name] for part in parts) for name in parts[0]}
    return gradients(policy.model), metrics


Compare = Callable[..., None]


@pytest.fixture
def compare(
    make_config: MakeConfig,
    start: PolicyModel,
    in_float64: Callable[[PolicyModel], Any],
    batch: pa.Table,
) -> Compare:
    """Return a function that compares gradient and metrics of a minibatch with the loop's. Trained
    policy, old policy, engine and reference model have four different sets of weights."""

    def compare(name: str, mask: Callable[[TrainingSample], TrainingSample]) -> None:
        config = make_config(CASES[name])
        policy, old_policy = perturbed(start, 1), in_float64(perturbed(start, 2))
        reference = Reference(start, own=True) if config.algorithm.kl_coefficient else None
        rows, advantages = batch.to_pylist(), advantages_of(batch.to_pylist(), config)
        samples, _ = read_training_samples(read_rollouts(batch), config, 0)
        minibatch = cut_minibatches(list(map(mask, samples)), 2, (0, 0))[0]
        chosen = rows_of(minibatch, batch)
        left_out = EQUAL not in {rows[at]["prompt_key"] for at in chosen}
        assert left_out == config.algorithm.dynamic_sampling
        with torch.no_grad():
            old = {at: logprobs_of(old_policy, rows[at], 0.7)[0] for at in chosen}
        model = in_float64(policy)
        loop = minibatch_loss(
            model,
            in_float64(start) if reference else None,
            [rows[at] for at in chosen],
            [advantages[at] for at in chosen],
            [old[at] for at in chosen],
            [sample.counted.tolist() for sample in minibatch],
            config,
        )
        loop.loss.backward()
        for num_ranks, micro_batch_tokens in LAYOUTS:
            cut = make_config(CASES[name], micro_batch_tokens=micro_batch_tokens)
            shares = []
            for rank in range(num_ranks):
                share = assign_share(minibatch, cut, rank, num_ranks)
                own = [old[at].numpy().astype(np.float32) for at in rows_of(share.samples, batch)]
                shares.append(replace(share, old_logprobs=own))
            found, metrics = update_of_ranks(policy, reference, shares, cut)
            assert relative_error(found, gradients(model)) < 1e-5
            seen = {name: metrics[name] for name in loop.metrics}
            assert seen == pytest.approx(loop.metrics, rel=1e-4, abs=1e-5)

    return compare


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_loops(compare: Compare, name: str) -> None:
    compare(name, lambda sample: sample)


@pytest.mark.parametrize("name", ["sequence ratio", "kl", "tis of sequences", "all at once"])
def test_tokens_that_do_not_count_are_nowhere(compare: Compare, name: str) -> None:
    """Mask out tokens at random: some of each response, and every token of some."""
    rng = np.random.default_rng(3)

    def mask(sample: TrainingSample) -> TrainingSample:
        counted = sample.counted & (rng.random(len(sample.counted)) < 0.5)
        return replace(sample, counted=counted)

    compare(name, mask)


def test_every_case_is_another_gradient(
    make_config: MakeConfig, start: PolicyModel, batch: pa.Table
) -> None:
    """Negative control: on this batch, each case's settings change the gradient."""
    policy, reference = perturbed(start, 1), Reference(start, own=True)
    plain, seen = None, {}
    for name, given in CASES.items():
        config = make_config(given)
        samples, _ = read_training_samples(read_rollouts(batch), config, 0)
        minibatch = cut_minibatches(samples, 1, (0, 0))[0]
        held = reference if config.algorithm.kl_coefficient else None
        found, _ = update_of_ranks(policy, held, [assign_share(minibatch, config, 0, 1)], config)
        plain = plain or found
        seen[name] = relative_error(found, plain)
    assert [name for name, error in seen.items() if error < 1e-3] == ["grpo"]


class Watched(Learner):
    """Records each update: its share, the weights before and after, and the raw gradient."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.updates: list[dict[str, Any]] = []

    def weights(self) -> dict[str, torch.Tensor]:
        named = self._policy.model.named_parameters()
        return {name: one.detach().double().clone() for name, one in named}

    def _update(self, share: Share) -> dict[str, float] | None:
        self.updates.append({"share": share, "policy": deepcopy(self._policy)})
        with mock.patch("refrain.engines.learn.learner.clip_gradient", self._watched_clipping):
            metrics = super()._update(share)
        self.updates[-1] |= {"after": self.weights(), "metrics": metrics}
        return metrics

    def _watched_clipping(self, policy: PolicyModel, max_norm: float) -> float:
        self.updates[-1]["gradient"] = gradients(policy.model)
        return clip_gradient(policy, max_norm)


TRAINER = {
    "minibatches_per_step": 3,
    "passes_per_step": 2,
    "learning_rate": 5e-3,
    "warmup_steps": 2,
    "decay": "linear",
    "decay_steps": 8,
    "min_learning_rate": 1e-3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
    "adam_beta2": 0.95,
    "micro_batch_tokens": 96,
}
RATES = [2.5e-3, 5e-3, 5e-3, 4.5e-3, 4e-3, 3.5e-3]
"""Two updates of warm-up. Then each update takes an eighth of the way from 5e-3 to 1e-3."""


@pytest.fixture
def step(make_config: MakeConfig, batch: pa.Table) -> tuple[Watched, dict[str, float]]:
    """Return the learner and the metrics after a step of six updates that uses every loss term."""
    algorithm = {
        "tis_cap": 1.3,
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.1,
        "clip_low": 0.1,
        "clip_high": 0.3,
    }
    learner = Watched(make_config(algorithm, **TRAINER))
    learner.restore(None)
    return learner, learner.train_step(batch)


def test_updates_of_a_step_are_the_loops(
    step: tuple[Watched, dict[str, float]],
    start: PolicyModel,
    in_float64: Callable[[PolicyModel], Any],
    batch: pa.Table,
) -> None:
    """Compare each update at the weights that it began with. The old policy is the one before the
    first update."""
    learner, metrics = step
    config, rows = learner._config, batch.to_pylist()
    advantages, first = advantages_of(rows, config), in_float64(start)
    loops = []
    for update in learner.updates:
        chosen = rows_of(update["share"].samples, batch)
        with torch.no_grad():
            old = [logprobs_of(first, rows[at], 0.7)[0] for at in chosen]
        model = in_float64(update["policy"])
        own = [[values[at] for at in chosen] for values in (rows, advantages)]
        counted = [sample.counted.tolist() for sample in update["share"].samples]
        loop = minibatch_loss(model, first, *own, old, counted, config)
        loop.loss.backward()
        assert relative_error(update["gradient"], gradients(model)) < 1e-5
        loops.append(loop.metrics)
    assert len(loops) == 6
    by_name = {name: [loop[name] for loop in loops] for name in loops[0]}
    assert by_name["actor/ratio_max"][0] == pytest.approx(1.0, abs=1e-4)
    expected = {name: np.mean(values) for name, values in by_name.items()}
    expected |= {name: max(by_name[name]) for name in PEAKS} | {
        name: min(by_name[name]) for name in LOWS
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert metrics["actor/ratio_max"] > 2.0 * np.mean(by_name["actor/ratio_max"][:1])


def test_updates_are_those_of_adamw(step: tuple[Watched, dict[str, float]]) -> None:
    """Apply AdamW by hand, in float64, to the clipped gradients that the trainer computed."""
    learner, metrics = step
    beta1, beta2 = ADAM_BETA1, TRAINER["adam_beta2"]
    names = learner.updates[0]["gradient"]
    first = {name: torch.zeros_like(one) for name, one in names.items()}
    second = {name: torch.zeros_like(one) for name, one in names.items()}
    norms = []
    for count, update in enumerate(learner.updates, 1):
        before = dict(update["policy"].model.named_parameters())
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in update["gradient"].values())))
        rate = RATES[count - 1]
        for name, raw in update["gradient"].items():
            gradient = raw * min(1.0, TRAINER["max_grad_norm"] / (norms[-1] + 1e-6))
            first[name] = beta1 * first[name] + (1 - beta1) * gradient
            second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
            moment = first[name] / (1 - beta1**count)
            spread = (second[name] / (1 - beta2**count)).sqrt()
            expected = before[name].detach().double() * (1 - rate * TRAINER["weight_decay"])
            expected = expected - rate * moment / (spread + 1e-8)
            torch.testing.assert_close(update["after"][name], expected, atol=3e-7, rtol=0.0)
        assert update["metrics"]["actor/grad_norm"] == pytest.approx(norms[-1], rel=1e-5)
        assert update["metrics"]["actor/lr"] == pytest.approx(rate)
    assert min(norms) > 2 * TRAINER["max_grad_norm"]
    assert metrics["actor/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-5)
    assert metrics["actor/lr"] == pytest.approx(RATES[-1])


def test_passes_have_the_same_minibatches_and_steps_others(
    step: tuple[Watched, dict[str, float]], batch: pa.Table
) -> None:
    learner, _ = step

    def prompts(updates: Sequence[dict[str, Any]]) -> list[set[str]]:
        return [{one.rollout.prompt_key for one in u["share"].samples} for u in updates]

    first = prompts(learner.updates)
    assert first[:3] == first[3:]
    assert set.union(*first) == {f"prompt{at}" for at in range(6)}
    learner.train_step(as_batch(batch.to_pylist(), 1))
    assert prompts(learner.updates[6:9]) != first[:3]
