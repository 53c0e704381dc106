"""Train models of three families. The trainer, transformers and vLLM must agree on the exported
models, and end responses at the same tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from refrain.engines.learn.checkpoint import MODEL_DIR
from refrain.engines.learn.learner import Learner
from refrain.schemas.config import TrainConfig
from tests.conftest import DEMO, REPOSITORY
from tests.flows.by_vllm import NUM_TOKENS
from tests.flows.commands import Command, write_config
from tests.flows.test_evaluate import SAMPLES as SAMPLES_OF_DEMO
from tests.flows.test_train import NUM_STEPS as STEPS_OF_DEMO
from tests.flows.test_train import query
from tests.learn.test_attention import SHAPES, SMALL
from tests.learn.test_export import assert_as_it_came_in

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

ENDS = [2, 1]
"""Tokens that end a response. Only generation_config.json lists both."""
SAMPLES = SAMPLES_OF_DEMO.replace(f"step = {STEPS_OF_DEMO}", "step = 2")
SEQUENCES = (
    "SELECT prompt_token_ids, response_token_ids, inference_logprobs "
    "FROM rollouts JOIN prompts USING (prompt_key) WHERE split = 'validation' AND step = 2 "
    "ORDER BY prompt_key, sample_index"
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 7 / 7
"""
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixture, two processes": ("qwen3_moe", {}, {"trainer__num_processes": 2}),
    "tied, adapters": (
        "qwen3",
        {"tie_word_embeddings": True},
        {"trainer__lora": {"rank": 4}, "trainer__learning_rate": 5e-2},
    ),
    "windows": ("mistral", {}, {}),
}


def make_start(path: Path, kind: str, more: dict[str, Any]) -> None:
    """Write a random model with the demo's tokenizer."""
    torch.manual_seed(0)
    tokens = {"vocab_size": 36, "eos_token_id": 2, "bos_token_id": None}
    shape = SMALL | SHAPES[kind] | tokens | {"head_dim": 32}  # vLLM on a CPU does not support 16.
    config = AutoConfig.for_model(kind, **shape | more)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    default = tokenizer.chat_template
    tokenizer.chat_template = {"default": default, "tools": "tools: {{ messages }}"}
    tokenizer.save_pretrained(path)
    generation = {"eos_token_id": ENDS, "do_sample": False, "temperature": 0.6}
    (path / "generation_config.json").write_text(json.dumps(generation))


def refrain(*args: str | Path) -> None:
    command = Command(*args)
    try:
        command.finish(timeout_s=900.0)
    finally:
        command.close()


def by_vllm(model: Path, prompts: list[list[int]], sequences: list[list[int]]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.flows.by_vllm", str(model)],
        input=json.dumps({"prompts": prompts, "sequences": sequences}),
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""},
        timeout=400,
        check=True,
    )
    return json.loads(done.stdout)


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].numpy()


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    found = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", RUNS)
def test_exported_model_is_the_trained_one(name: str, tmp_path: Path) -> None:
    kind, shape, changes = RUNS[name]
    start, reward = tmp_path / "start", tmp_path / "score.py"
    make_start(start, kind, shape)
    reward.write_text(REWARD)
    settings = {
        "num_epochs": 1,
        "model__path": str(start),
        "data__max_response_tokens": 64,
        "rollout__group_size": 4,
        "rollout__num_engines": 1,
        "reward": {"type": "function", "path": str(reward)},
        "trainer__learning_rate": 1e-2,
        "trainer__num_threads": 1,
    }
    refrain("train", write_config(tmp_path, num_prompts=8, **settings | changes))
    runs, figures = tmp_path / "runs", tmp_path / "figures.json"
    run = runs / "demo"
    checkpoint = run / "checkpoints" / "global_step_2"
    exported = checkpoint / MODEL_DIR
    assert_as_it_came_in(start, exported)

    refrain("evaluate", checkpoint, "--runs-dir", runs, "--name", "again", "--json", figures)
    summary = json.loads((run / "summary.json").read_text())
    assert json.loads(figures.read_text())["reward_mean"] == summary["validation_last"]
    samples = query(runs / "evaluations" / "again", SAMPLES)
    assert samples == query(run, SAMPLES)
    ended = {ids[-1] for _, _, ids, reason, _ in samples if reason == "stop"}
    assert ended == set(ENDS)

    rows = query(run, SEQUENCES)
    prompts, sequences = [row[0] for row in rows[::4]], [row[0] + row[1] for row in rows]
    config = TrainConfig.model_validate_json((run / "config.json").read_text())
    learner = Learner(config)
    learner.restore(checkpoint)
    trained = learner.logprobs(sequences)
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    assert model.generation_config.eos_token_id == ENDS
    engine = by_vllm(exported, prompts, sequences)
    for ids, row, own, others in zip(sequences, rows, trained, engine["logprobs"], strict=True):
        np.testing.assert_allclose(own, logprobs_of(model, ids), atol=1e-4)
        np.testing.assert_allclose(own, others, atol=1e-4)
        np.testing.assert_allclose(own[len(row[0]) - 1 :], row[2], atol=1e-4)
    before = AutoModelForCausalLM.from_pretrained(start).eval()
    assert np.abs(trained[0] - logprobs_of(before, sequences[0])).max() > 0.05
    assert engine["tokens"] == [greedy(model, prompt) for prompt in prompts]
