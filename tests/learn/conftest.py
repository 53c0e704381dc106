"""A tiny random Qwen3 model with a tokenizer, and batches for it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from engines.learn.learner import Learner
from engines.store.tables import TRAINING
from schemas.config import TrainConfig

VOCAB_SIZE = 64
GENERATION = {"do_sample": False, "temperature": 0.9, "eos_token_id": [1, 5]}
"""Settings that transformers reads and refuses to save, as Llama 2 had."""

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=96,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    vocabulary = {f"t{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1")
    fast.chat_template = {"default": "{{ messages }}", "tools": "tools: {{ messages }}"}
    fast.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(GENERATION))
    return path


@pytest.fixture
def make_config(model_dir: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A configuration; keyword arguments replace fields of `trainer` and `algorithm`."""

    def make(algorithm: dict | None = None, **trainer: object) -> TrainConfig:
        return TrainConfig.model_validate(
            {
                "runs_dir": tmp_path / "runs",
                "model": {"path": model_dir, "dtype": "float32"},
                "data": {
                    "train": ["unused"],
                    "max_prompt_tokens": 32,
                    "max_response_tokens": 32,
                },
                "rollout": {"temperature": 0.7},
                "algorithm": algorithm or {},
                "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 256} | trainer,
            }
        )

    return make


def as_batch(rows: list[dict], policy_version: int = 0) -> pa.Table:
    """The batch of an ordinary step: one version, and groups that are complete."""
    groups: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["sample_index"]):
        groups.setdefault(row["prompt_key"], []).append(row)
    columns = [
        {
            "origin_step": policy_version + 1,
            "group_rewards": [other["reward"] for other in groups[row["prompt_key"]]],
            "group_lengths": [
                len(other["response_token_ids"]) for other in groups[row["prompt_key"]]
            ],
            "version_spans": [
                {
                    "policy_version": policy_version,
                    "num_tokens": len(row["response_token_ids"]),
                }
            ],
        }
        for row in rows
    ]
    pairs = zip(rows, columns, strict=True)
    return pa.Table.from_pylist(
        [{"truncated": False} | row | more for row, more in pairs], schema=TRAINING
    )


def make_batch(
    seed: int = 0, num_groups: int = 6, group_size: int = 4, policy_version: int = 0
) -> pa.Table:
    """Random rollouts whose recorded log-probabilities are those of no policy in particular."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(num_groups):
        prompt = rng.integers(VOCAB_SIZE, size=rng.integers(2, 20)).tolist()
        for sample in range(group_size):
            response = rng.integers(VOCAB_SIZE, size=rng.integers(1, 25)).tolist()
            rows.append(
                {
                    "prompt_key": f"prompt{group}",
                    "sample_index": sample,
                    "prompt_token_ids": prompt,
                    "response_token_ids": response,
                    "inference_logprobs": rng.normal(-4.0, 0.3, len(response)).tolist(),
                    "reward": float(rng.normal()),
                }
            )
    return as_batch(rows, policy_version)


def on_policy(batch: pa.Table, learner: Learner, temperature: float) -> pa.Table:
    """The batch with the log-probabilities and the version of the learner's own policy."""
    rows = batch.to_pylist()
    sequences = [row["prompt_token_ids"] + row["response_token_ids"] for row in rows]
    for row, logprobs in zip(rows, learner.logprobs(sequences, temperature), strict=True):
        row["inference_logprobs"] = logprobs[len(row["prompt_token_ids"]) - 1 :].tolist()
    return as_batch(rows, learner.policy_version)
