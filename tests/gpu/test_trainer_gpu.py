"""refrain's trainer on a GPU: time, memory and MFU of an update.

Other tests show that packing, and the engines' data type, do not change its results.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.models import config_of, num_parameters, write_model
from tests.gpu.needs import REHEARSAL, needs

SHAPES = ("qwen3-tiny", "llama-tiny") if REHEARSAL else ("qwen3-1.7b", "llama-1b")
LENGTHS = (16, 80) if REHEARSAL else (64, 2048)
"""Shortest and longest response."""
PROMPT_TOKENS, NUM_GROUPS, GROUP_SIZE = (16, 2, 4) if REHEARSAL else (64, 8, 8)
MICRO_BATCH_TOKENS = 256 if REHEARSAL else 16_384
UPDATES = 2 if REHEARSAL else 3
"""Updates to run. The first loads code and is timed separately."""
BF16_FLOPS = 989e12
"""Dense bf16 rate of an H100 or H200, from NVIDIA's data sheet."""


@needs("cuda", "transformers", "jaxtyping", "pyarrow", seconds=75)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_update(shape: str, tmp_path: Path, device: str, figures: Callable) -> None:
    """Time `Learner.train_step`: float32 weights, bf16 products, activations recomputed."""
    from tests.learn.conftest import as_batch

    learner = _learner(shape, tmp_path, device)
    rows = _rollouts(config_of(shape).vocab_size)
    before = _beginning(learner)
    seconds = []
    for _ in range(UPDATES):
        _wait(device)
        started_s = time.perf_counter()
        metrics = learner.train_step(as_batch(rows, learner.policy_version))
        _wait(device)
        seconds.append(time.perf_counter() - started_s)
    assert np.isfinite(metrics["actor/grad_norm"])
    assert metrics["actor/grad_norm"] > 0.0
    assert not torch.equal(before, _beginning(learner))
    name, own_s = "trainer_" + shape.replace("-", "_").replace(".", "_"), min(seconds[1:])
    lengths = [PROMPT_TOKENS + len(row["response_token_ids"]) for row in rows]
    flops = _flops(shape, lengths)
    figures(**{f"{name}_step_s": own_s, f"{name}_first_step_s": seconds[0]})
    figures(**{f"{name}_tokens_per_s": sum(lengths) / own_s, f"{name}_model_tflop": flops / 1e12})
    if device == "cuda":
        figures(**{f"{name}_mfu": flops / own_s / BF16_FLOPS})
        figures(**{f"{name}_peak_gb": torch.cuda.max_memory_allocated() / 1e9})


def _flops(shape: str, lengths: Sequence[int]) -> float:
    """Return the model's FLOPs, forward and backward, without recomputation.

    Count 6 per parameter and token, and causal attention. Embeddings count only as a tied head.
    """
    config = config_of(shape)
    num_matmul = num_parameters(shape)
    if not config.tie_word_embeddings:
        num_matmul -= config.vocab_size * config.hidden_size
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 0)
    width = width or config.hidden_size
    attention = 6 * config.num_hidden_layers * width * sum(n * n for n in lengths)
    return 6.0 * num_matmul * sum(lengths) + attention


@needs("cuda", "transformers", "jaxtyping", "pyarrow", seconds=30)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_float32_is_float32_whatever_the_engines_compute_in(
    family: str, tmp_path: Path, device: str, figures: Callable
) -> None:
    """A trainer that trains in bf16 computes its canaries in float32.

    They equal those of a float32 model. The rounding is not zero, but small.
    """
    from refrain.engines.learn.loading import Loading, load_policy
    from refrain.engines.learn.packing import TokenSequence
    from refrain.engines.learn.policy import score_sequences

    learner = _learner(f"{family}-tiny", tmp_path, device)
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 512, n).tolist() for n in (80, 60, 30)]
    found = learner.canaries(texts)
    plain = load_policy(tmp_path / "model", Loading(torch.device(device)))
    sequences = [TokenSequence(np.asarray(text, np.int32), 1) for text in texts]
    expected = score_sequences(plain, sequences, MICRO_BATCH_TOKENS, 1.0)
    rounding = 0.0
    for canary, own in zip(found, expected, strict=True):
        assert np.abs(np.asarray(canary.trainer_logprobs) - own).max() < 1e-3
        rounding = max(rounding, float(np.abs(np.asarray(canary.rounded_logprobs) - own).mean()))
    assert REHEARSAL or 1e-4 < rounding < 0.5
    figures(**{f"trainer_{family}_tiny_rounding_nats": rounding})


@needs("cuda", "transformers", "jaxtyping", seconds=30)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_samples_that_share_a_row_do_not_see_each_other(
    family: str, tmp_path: Path, device: str
) -> None:
    """Float32 is strict. In bf16, attention uses another kernel, with its own rounding."""
    from refrain.engines.learn.packing import TokenSequence
    from refrain.engines.learn.policy import score_sequences
    from refrain.engines.learn.precision import ComputeIn

    policy = _learner(f"{family}-tiny", tmp_path, device)._policy
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(rng.integers(512, size=16 + n).astype(np.int32), 16)
        for n in rng.integers(*LENGTHS, size=12)
    ]
    for dtype, most in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        with ComputeIn(dtype):
            together = score_sequences(policy, sequences, 16_384, 1.0)
            alone = [score_sequences(policy, [one], 16_384, 1.0)[0] for one in sequences]
        for packed, expected in zip(together, alone, strict=True):
            assert np.abs(packed - expected).mean() < most
        shifted = [*alone[1:], alone[0]]
        assert not all(
            len(a) == len(b) and np.abs(a - b).mean() < most
            for a, b in zip(alone, shifted, strict=True)
        )


def _learner(shape: str, directory: Path, device: str) -> Any:
    from refrain.engines.learn.learner import Learner
    from refrain.schemas.config import TrainConfig

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = write_model(shape, device, torch.bfloat16, directory / "model")
    config = TrainConfig.model_validate(
        {
            "runs_dir": directory,
            "model": {"path": model, "dtype": "bfloat16"},
            "data": {
                "train": ["none"],
                "max_prompt_tokens": PROMPT_TOKENS,
                "max_response_tokens": LENGTHS[1],
            },
            "trainer": {"learning_rate": 1e-5, "micro_batch_tokens": MICRO_BATCH_TOKENS},
        }
    )
    learner = Learner(config)
    learner.restore(None)
    return learner


def _rollouts(vocab_size: int) -> list[dict]:
    rng = np.random.default_rng(0)
    rows = []
    for group in range(NUM_GROUPS):
        prompt = rng.integers(2, vocab_size, PROMPT_TOKENS).tolist()
        for sample in range(GROUP_SIZE):
            response = rng.integers(2, vocab_size, rng.integers(*LENGTHS)).tolist()
            rows.append(
                {
                    "prompt_key": f"prompt{group}",
                    "sample_index": sample,
                    "prompt_token_ids": prompt,
                    "response_token_ids": response,
                    "inference_logprobs": rng.normal(-8.0, 0.3, len(response)).tolist(),
                    "reward": float(sample % 2),
                }
            )
    return rows


def _beginning(learner: Any) -> torch.Tensor:
    weight = learner._policy.model.get_output_embeddings().weight
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole[:8].detach().clone()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
