"""`ComputeIn(dtype)`: a policy gives what the model loaded in that data type gives."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.policy import PolicyModel, score_sequences
from refrain.engines.learn.precision import ComputeIn
from tests.learn.test_attention import SHAPES, model_of

CPU = torch.device("cpu")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SEQUENCES = [
    TokenSequence(np.arange(1, 40, dtype=np.int32), 20),
    TokenSequence(np.arange(5, 30, dtype=np.int32), 24),
]


def scores(policy: PolicyModel) -> list[NDArray[np.float32]]:
    return score_sequences(policy, SEQUENCES, 256, 1.0)


def largest(one: Sequence[NDArray], other: Sequence[NDArray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


@pytest.fixture
def bfloat16_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a model whose weights are exact in bfloat16."""
    model_of(request.param).to(BFLOAT16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("bfloat16_dir", SHAPES, indirect=True)
def test_each_data_type_gives_what_a_model_of_it_gives(bfloat16_dir: Path) -> None:
    exact, rounded = (
        load_policy(bfloat16_dir, Loading(CPU, dtype=dtype)) for dtype in (FLOAT32, BFLOAT16)
    )
    in_float32, in_bfloat16 = scores(exact), scores(rounded)
    assert largest(in_float32, in_bfloat16) > 1e-3
    with ComputeIn(BFLOAT16):
        assert largest(scores(exact), in_bfloat16) == 0.0
    with ComputeIn(FLOAT32):
        assert largest(scores(rounded), in_float32) == 0.0
    assert largest(scores(exact), in_float32) == 0.0


@pytest.mark.parametrize("bfloat16_dir", ["qwen3", "qwen3_moe", "gemma2"], indirect=True)
def test_a_sharded_policy_in_mixed_precision_does_so_too(
    bfloat16_dir: Path, mesh: DeviceMesh
) -> None:
    """On a GPU, the trainer keeps parameters in float32, and gathers and computes in bfloat16."""
    mixed = load_policy(bfloat16_dir, Loading(CPU, mesh, compute_dtype=BFLOAT16))
    exact = scores(load_policy(bfloat16_dir, Loading(CPU)))
    assert largest(scores(mixed), exact) > 1e-3
    with ComputeIn(FLOAT32):
        assert largest(scores(mixed), exact) < 1e-5


def test_the_parameters_stay_as_they_are(model_dir: Path) -> None:
    policy = load_policy(model_dir, Loading(CPU))
    before = {name: one.clone() for name, one in policy.named_parameters()}
    with ComputeIn(BFLOAT16):
        scores(policy)
    after = dict(policy.named_parameters())
    torch.testing.assert_close(after, before, atol=0.0, rtol=0.0)
