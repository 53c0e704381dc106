"""A trainer rank writes the weights file while engines receive the weights from its GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from refrain.engines.learn.publishing import WholeTensors
from refrain.engines.learn.trainer import TrainerActor
from refrain.schemas.config import TrainConfig
from refrain.schemas.weights import WeightsFile
from tests.learn.conftest import make_batch


class Taking:
    """Fake receivers. They take all tensors, and check the state of the rank that sends them."""

    def __init__(self, actor: TrainerActor) -> None:
        self.learner = actor._learner
        self.files = actor._files
        self.taken: dict[str, torch.Tensor] = {}

    def send(self, rank: int, policy_version: int, whole: WholeTensors) -> tuple[str, ...]:
        assert all(one.grad is None for one in self.learner._policy.parameters())
        for name, tensor in whole.tensors:
            self.taken[name] = tensor.to(whole.dtype, copy=True)
            assert not self.files.has(policy_version)
        assert self.files.has(policy_version) is (rank == 0)
        assert self.taken.keys() == whole.shapes.keys()
        return ("rollout engine 3 is silent",)


@pytest.fixture
def actor(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> Iterator[TrainerActor]:
    def announced(self: TrainerActor, policy_version: int) -> WeightsFile:
        told.append("announced")
        return WeightsFile(self._files.path(policy_version), 0, 2)

    monkeypatch.setattr(TrainerActor, "_announced", announced)
    made = TrainerActor(make_config(), 0)
    made.restore(None)
    told: list[str] = []
    canaries = made._learner.canaries

    def noted(token_ids: object) -> object:
        told.append("canaries")
        return canaries(token_ids)

    monkeypatch.setattr(made._learner, "canaries", noted)
    made.told = told
    yield made
    made._files.delete()


def file_of(weights: object) -> dict[str, torch.Tensor]:
    path: Path = weights.source.path
    return safetensors.torch.load_file(path)


def test_one_gather_serves_file_and_engines(actor):
    actor.train_step(make_batch())
    assert any(one.grad is not None for one in actor._learner._policy.parameters())
    weights = actor.publish(1, None, receivers := Taking(actor))
    assert weights.not_handed == ("rollout engine 3 is silent",)
    assert weights.canaries
    found = file_of(weights)
    assert found.keys() == receivers.taken.keys()
    assert all(torch.equal(found[name], receivers.taken[name]) for name in found)
    # Canaries come first: the receiving engines take memory that canaries need.
    assert actor.told == ["canaries", "announced"]
    actor.train_step(make_batch(policy_version=1))


def test_where_none_take_them_they_are_on_their_way_first(actor):
    weights = actor.publish(0, [[5, 6, 7]])
    assert weights.not_handed == ()
    assert [canary.token_ids for canary in weights.canaries] == [(5, 6, 7)]
    assert file_of(weights)
    assert actor.told == ["announced", "canaries"]
