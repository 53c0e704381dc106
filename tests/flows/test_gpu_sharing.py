"""Engines and trainer use the same GPUs in turns. Tokens, rewards and weights are the same as with
separate GPUs, even when a process is killed during a turn. The GPUs are not real: Ray is only told
that there are some."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from refrain.engines.learn.checkpoint import latest_checkpoint
from tests.flows.commands import Command, write_config
from tests.flows.test_train import query

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_GPUS = 2
WITH_DEATHS_S = 1000.0
"""Time limit of a run whose engines restart, on a busy machine."""
SAMPLES = (
    "SELECT split, step, prompt_key, sample_index, response_token_ids, reward "
    "FROM rollouts JOIN rewards USING (split, step, prompt_key, sample_index) ORDER BY ALL"
)
OF_ENGINES = [
    ("engines", "leave_gpus", "before", 2, "engine"),
    ("engines", "leave_gpus", "during", 3, "engine"),
    ("engines", "leave_gpus", "after", 4, "engine"),
    ("engines", "enter_gpus", "before", 4, "engine"),
    ("engines", "enter_gpus", "after", 5, "engine"),
]
"""Kills in one run, which goes on. The engines leave their GPUs once before the first step."""
OF_THE_TRAINER = [
    ("engines", "leave_gpus", "during", 2, "trainer"),
    ("trainer", "enter_gpus", "during", 1, "trainer"),
    ("trainer", "enter_gpus", "after", 1, "trainer"),
    ("trainer", "leave_gpus", "before", 2, "trainer"),
    ("engines", "enter_gpus", "during", 2, "trainer"),
]
"""Kills that each end the run. The test then resumes it."""


def start(*args: str | Path, points: Any = (), num_gpus: int = NUM_GPUS, **more: str) -> Command:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["RAY_OVERRIDE_RESOURCES"] = json.dumps({"GPU": num_gpus})
    environment |= more
    command = [json.dumps(points), "train", *args]
    return Command(*command, environment=environment, module="tests.flows.hand_over")


def assert_same(run_dir: Path, reference: Path) -> None:
    samples = query(run_dir, SAMPLES)
    assert len(samples) > 300
    assert samples == query(reference, SAMPLES)
    weights, expected = map(final_weights, (run_dir, reference))
    assert weights.keys() == expected.keys()
    assert all((weights[name] == expected[name]).all() for name in expected)


def final_weights(run_dir: Path) -> dict[str, Any]:
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    assert checkpoint is not None
    return load_file(checkpoint / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("turns")


@pytest.fixture(scope="module")
def config(directory: Path) -> Path:
    """Write a config with which a killed trainer ends the run. The test resumes it."""
    return write_config(directory, trainer__max_failures=0)


@pytest.fixture(scope="module")
def split(directory: Path, config: Path) -> Path:
    """Run the reference, in which engines and trainer have separate GPUs."""
    start(config, "name=split", "placement=split", num_gpus=NUM_GPUS + 1).finish()
    return directory / "runs" / "split"


def test_engines_that_are_killed_while_the_gpus_change_hands(config: Path, split: Path) -> None:
    output = start(config, "name=engines", points=OF_ENGINES).finish(WITH_DEATHS_S)
    assert output.count("killed: engine") == len(OF_ENGINES)
    assert_same(split.parent / "engines", split)


def test_a_trainer_that_is_killed_and_a_change_of_placement(config: Path, split: Path) -> None:
    run_dir, begin = split.parent / "trainer", (config, "name=trainer")
    for point in OF_THE_TRAINER:
        run = start(*begin, points=[point])
        assert run.process.wait(WITH_DEATHS_S) == 1
        output = "".join(run.lines)
        assert "killed: trainer" in output
        assert "trainer rank" in output
        begin = ("--resume", run_dir)
    start(*begin, "placement=split", num_gpus=NUM_GPUS + 1).finish()
    assert_same(run_dir, split)


def test_run_needs_only_one_gpu(config: Path, split: Path) -> None:
    start(config, "name=one", "rollout.num_engines=1", num_gpus=1).finish()
    assert_same(split.parent / "one", split)


def test_weights_that_stay_on_the_gpu(config: Path, split: Path) -> None:
    """The run must not read any file of weights."""
    values = ("rollout.weight_sync=ipc", "rollout.num_engines=1")
    gpus = str(Path(__file__).parent / "with_gpus")
    output = start(config, "name=ipc", *values, num_gpus=1, PYTHONPATH=gpus).finish()
    assert "reads the weights from their file" not in output
    assert "started again" not in output
    assert_same(split.parent / "ipc", split)
