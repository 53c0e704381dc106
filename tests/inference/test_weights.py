"""Engines map the weights file of their node, and refuse wrong weights.

Each node gets every policy version once.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch

from refrain.engines.couriers import FAN_OUT
from refrain.engines.inference.weights.canary import FLOAT32_TOLERANCE
from refrain.engines.learn.publishing import WholeTensors, publish
from refrain.engines.rollout.interface import WeightSyncError
from refrain.engines.weights_file import VersionFiles
from refrain.schemas.weights import PolicyWeights, WeightsFile
from tests.conftest import REPOSITORY
from tests.inference.sent_weights import NUM

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]


@pytest.fixture
def files() -> Iterator[VersionFiles]:
    made = VersionFiles(num_kept=2)
    yield made
    made.delete()


def weights_in(files: VersionFiles, whole: WholeTensors, version: int, canaries) -> PolicyWeights:
    path = publish(whole, version, files)
    node = ray.get_runtime_context().get_node_id()
    return PolicyWeights(version, WeightsFile(path, path.stat().st_size, 2, node), canaries)


def one_wrong(whole: WholeTensors) -> WholeTensors:
    wrong = "model.layers.1.mlp.down_proj.weight"
    assert wrong in whole.shapes
    tensors = (
        (name, tensor + 0.1 * torch.randn_like(tensor) if name == wrong else tensor)
        for name, tensor in whole.tensors
    )
    return WholeTensors(whole.shapes, tensors, whole.dtype)


def copies_of_weights() -> list[str]:
    """Return the unnamed memory files with weights, of all processes of this user."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.append(os.readlink(link))
    return [name for name in found if "refrain weights" in name]


async def test_two_engines_map_one_file(engines, learner, prompts, files):
    canaries = learner.canaries(prompts[:4])
    for version in range(3):
        weights = weights_in(files, learner.to_publish(), version, canaries)
        loading = asyncio.gather(*(engine.load_weights(weights) for engine in engines))
        while not loading.done():
            assert not copies_of_weights()
            await asyncio.sleep(0.01)
        assert max(await loading) < FLOAT32_TOLERANCE
    directory = weights.source.path.parent
    assert sorted(p.name for p in directory.iterdir()) == ["1.safetensors", "2.safetensors"]


async def test_wrong_weights_are_refused(engines, learner, prompts, files):
    canaries = learner.canaries(prompts[:4])
    wrong = weights_in(files, one_wrong(learner.to_publish()), 0, canaries)
    with pytest.raises(WeightSyncError, match=r"engine 0 after .* differs from the trainer"):
        await engines[0].load_weights(wrong)
    good = weights_in(files, learner.to_publish(), 1, canaries)
    assert await engines[0].load_weights(good) < FLOAT32_TOLERANCE
    other = PolicyWeights(2, good.source, canaries)
    with pytest.raises(WeightSyncError, match=r"engine 0: .* is of policy version 1, not 2"):
        await engines[0].load_weights(other)
    path = good.source.path
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(WeightSyncError, match=r"engine 0: .* bytes, but its header says"):
        await engines[0].load_weights(good)
    path.unlink()
    with pytest.raises(WeightSyncError, match=r"engine 0: .* is gone: policy version 1"):
        await engines[0].load_weights(good)
    again = weights_in(files, learner.to_publish(), 3, canaries)
    assert await engines[0].load_weights(again) < FLOAT32_TOLERANCE


async def test_each_node_has_a_version_once_and_before_it_is_asked_for():
    command = [sys.executable, "-m", "tests.inference.sent_weights"]
    options = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 300.0}
    done = await asyncio.to_thread(subprocess.run, command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = (line for line in done.stdout.splitlines() if line.startswith('{"values"'))
    what = json.loads(said)
    versions = [0, 0, 0, 1, 2, 1, 2, 2, 2]
    assert what["values"] == [[float(i + version) for i in range(NUM)] for version in versions]
    assert what["one_file_a_node"]
    assert what["times_brought"] == 1.0
    assert what["before_it_is_asked_for"] == ["0.safetensors", "1.safetensors"]
    assert what["times_in_all"] == 3.0
    assert what["last"] == ["1.safetensors", "2.safetensors"]
    assert "WeightSyncError" in what["too_old"]
    assert "policy version 0 did not reach the node of engine 0" in what["too_old"]
    assert what["after_a_death"] == ["2.safetensors"]
    assert what["passed_on"] == [[float(i + v) for i in range(NUM)] for v in (3, 3, 3, 4, 4, 4)]
    assert what["origin_sent"] == pytest.approx(FAN_OUT, abs=0.01)
    assert what["parent_sent"] == 1.0
    assert not what["left"]
