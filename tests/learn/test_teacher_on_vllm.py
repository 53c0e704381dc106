"""A teacher on a real vLLM server gives the update of the same teacher in the trainer."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch

from refrain.engines.learn.learner import Learner
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.teacher.client import TeacherClient
from refrain.schemas.config import TrainConfig
from refrain.tasks.run.model_inputs import check_teacher_server, read_tokenizer
from tests.conftest import DEMO
from tests.learn.conftest import as_batch, make_batch, on_policy, started
from tests.sockets import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

TEACHER, STUDENT = DEMO / "model", DEMO / "drafter"
NUM_TOKENS = 36
START_S = 400.0
SERVER = {"model": "teacher", "api_key": "sesame"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the demo's model. Its steps take few tokens, so that prompts come in pieces."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = (
        f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {TEACHER} --host 127.0.0.1"
        f" --port {port} --served-model-name {SERVER['model']} --api-key {SERVER['api_key']}"
        " --dtype float32 --max-model-len 400 --enforce-eager --kv-cache-memory-bytes 134217728"
        " --max-num-batched-tokens 64 --max-num-seqs 16"
    )
    with log.open("w") as out, subprocess.Popen(command.split(), stdout=out, stderr=out) as server:
        try:
            wait_until_it_answers(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60.0)


def wait_until_it_answers(url: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(url, timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1.0)
    raise AssertionError(f"vLLM does not serve: {log.read_text()[-3000:]}")


def config(runs_dir: Path, **algorithm: object) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "runs_dir": runs_dir,
            "model": {"path": STUDENT, "dtype": "float32"},
            "data": {"train": [DEMO / "data" / "train.parquet"], "max_prompt_tokens": 128}
            | {"max_response_tokens": 256},
            "algorithm": algorithm,
            "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 1024},
        }
    )


def batch_of(learner: Learner) -> pa.Table:
    """Return samples of the student's tokens. One group has a prompt of several blocks."""
    rows = make_batch(num_groups=6).to_pylist()
    for row in rows:
        for name in ("prompt_token_ids", "response_token_ids"):
            row[name] = [id % NUM_TOKENS for id in row[name]]
        if row["prompt_key"] == "prompt0":
            row["prompt_token_ids"] = (
                np.random.default_rng(1).integers(NUM_TOKENS, size=300).tolist()
            )
    return on_policy(as_batch(rows), learner, temperature=1.0)


def gradients(learner: Learner) -> list[torch.Tensor]:
    return [one.grad for one in learner._policy.parameters() if one.grad is not None]


def test_the_server_gives_the_update_of_the_model(url: str, tmp_path: Path) -> None:
    remote_config = config(tmp_path, teacher_server=SERVER | {"urls": url})
    check_teacher_server(remote_config, read_tokenizer(remote_config.model))
    local, remote = started(config(tmp_path, teacher=TEACHER)), started(remote_config)
    batch = batch_of(local)
    rows = batch.to_pylist()
    prompts = [TokenSequence(np.array(row["prompt_token_ids"]), 1) for row in rows]
    assert remote_config.algorithm.teacher_server
    TeacherClient(remote_config.algorithm.teacher_server).score(prompts)  # They are cached now.
    expected, found = local.train_step(batch), remote.train_step(batch)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert abs(found["actor/teacher_kl"]) > 0.1
    torch.testing.assert_close(gradients(remote), gradients(local), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"model": "other"}, "has no model 'other', but teacher"),
        ({"api_key": "guess"}, "status 401"),
    ],
)
def test_what_the_server_refuses_is_refused(
    url: str, tmp_path: Path, wrong: dict, why: str
) -> None:
    given = config(tmp_path, teacher_server=SERVER | {"urls": url} | wrong)
    with pytest.raises(ValueError, match=f"algorithm.teacher_server: {url}.*{why}"):
        check_teacher_server(given, read_tokenizer(given.model))
