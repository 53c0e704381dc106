"""Training on the demo's problems: the reward rises."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.gpu.needs import REHEARSAL, needs

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "infra" / "demo"
NUM_PROMPTS, GROUP_SIZE = 32, 8
NUM_STEPS = 5 if REHEARSAL else 10
LEARNING_RATE = 4e-4
RISE = 0.05
"""Reward that is gained, at least."""
RUN_S = 150.0


@needs("cuda", "vllm", "transformers", "pyarrow", "jaxtyping", seconds=90)
def test_an_engine_and_a_trainer_on_one_card(tmp_path: Path, figures: Callable) -> None:
    """Without Ray: they take turns in one process, on the same prompts in each step. Before and
    after, samples are drawn with the same noise: without training there is nothing between them."""
    from engines.data.dataset import load_dataset, load_tokenizer
    from engines.inference.engine.vllm_engine import VLLMEngine
    from engines.learn.learner import Learner
    from schemas.drafting import DraftingConfig
    from tests.gpu.local_engine import started, train_config
    from tests.learn.conftest import as_batch

    config = train_config(
        DEMO / "model", tmp_path, 128, response_tokens=256, dtype="float32", canary_tolerance=1e-3
    )
    trainer = config.trainer.model_copy(update={"learning_rate": LEARNING_RATE})
    config = config.model_copy(update={"trainer": trainer})
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_dataset((DEMO / "data" / "train.parquet",), tokenizer, 128).prompts
    learner = Learner(config)
    learner.restore(None)
    off = DraftingConfig(enabled=False)
    engine_config = config.engine.model_copy(update={"drafting": off, "takes_turns": True})
    with started(VLLMEngine, engine_config) as engine:
        work = (engine, learner, tokenizer, prompts[:NUM_PROMPTS])
        first = fmean(row["reward"] for row in _rewarded(*work, 0))
        for step in range(1, NUM_STEPS + 1):
            rows = [_trained_on(row) for row in _rewarded(*work, step)]
            _hand_over(engine, learner)
            learner.train_step(as_batch(rows, learner.policy_version))
        last = fmean(row["reward"] for row in _rewarded(*work, 0))
    figures(loop_reward_first=first, loop_reward_last=last)
    assert last > first + RISE


def _rewarded(engine: Any, learner: Any, tokenizer: Any, prompts: Any, step: int) -> list[dict]:
    """Rollouts of the learner's policy with the noise of a step, and their rewards."""
    from engines.answers.builtin import builtin_scorer
    from schemas.weights import PolicyWeights

    _hand_over(engine, learner)
    canaries = learner.canaries([prompt.token_ids for prompt in prompts[:4]])
    weights = PolicyWeights(learner.policy_version, learner.weights_buffer(), canaries)
    learner.leave_gpu(state=True)
    engine.wait(engine.engine.wake())
    engine.wait(engine.engine.load_weights(weights))
    by_key = {prompt.key: prompt for prompt in prompts}
    rows, _ = engine.roll_out([r for prompt in prompts for r in _requests(prompt, step)])
    for row in rows.values():
        prompt = by_key[row["prompt_key"]]
        text = tokenizer.decode(row["response_token_ids"], skip_special_tokens=True)
        score = builtin_scorer(prompt.data_source)(text, prompt.ground_truth)
        row["reward"] = float(score["score"])
    return list(rows.values())


def _hand_over(engine: Any, learner: Any) -> None:
    """The card to the learner, which may have it already."""
    engine.wait(engine.engine.sleep())
    learner.enter_gpu()


def _requests(prompt: Any, step: int) -> list:
    from schemas.keys import sample_key
    from schemas.rollout import RequestId, RolloutRequest, Split

    first = RolloutRequest(RequestId(Split.TRAIN, step, prompt.key, 0), prompt.token_ids, 0, 256)
    return [
        replace(
            first,
            id=replace(first.id, sample_index=i),
            sample_key=sample_key(0, step, "train", prompt.key, i),
        )
        for i in range(GROUP_SIZE)
    ]


def _trained_on(row: dict) -> dict:
    columns = ("prompt_key", "sample_index", "prompt_token_ids", "response_token_ids")
    return {name: row[name] for name in (*columns, "inference_logprobs", "reward")}


@needs("cuda", "vllm", "ray", "prefect", "mlflow", "duckdb", gpus=2, seconds=RUN_S)
def test_a_run_from_the_command_line(tmp_path: Path, figures: Callable) -> None:
    """Engine and trainer have a GPU each."""
    command = [sys.executable, "-m", "flows.cli", "train", "infra/demo/train.yaml"]
    values = ["name=gpu", f"runs_dir={tmp_path}", "num_epochs=2", "rollout.num_engines=1"]
    done = subprocess.run(
        [*command, *values, "data.validation=[]"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=480.0 if REHEARSAL else RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = json.loads((tmp_path / "gpu" / "summary.json").read_text())
    first, last = summary["reward_first"], summary["reward_last"]
    figures(run_reward_first=first, run_reward_last=last, run_wall_s=summary["wall_s"])
    assert last > first + RISE
