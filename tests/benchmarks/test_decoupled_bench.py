"""Helpers of the bench of draft models, without engines."""

import os
from types import SimpleNamespace
from typing import cast

import pytest

from refrain.benchmarks import one_step
from refrain.benchmarks.decoupled import DraftedLap, Earlier
from refrain.engines.histospec.index_file import index_path, open_index
from refrain.flows.bench import launch_bench
from refrain.schemas.rollout import (
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    Split,
    VersionSpan,
)
from tests.conftest import DEMO

KEYS = ("a" * 32, "b" * 32)


def rollout(key: str, index: int) -> Rollout:
    request = RolloutRequest(RequestId(Split.TRAIN, 1, key, index), (5, 6, 7), 1, 10)
    generated = Generated([8, 9, index], [0.0] * 3, (VersionSpan(0, 3),))
    return Rollout(request, generated, FinishReason.STOP, 0, 0.0, 1.0)


def test_one_core_is_not_split(monkeypatch):
    """The error comes before the bench reads anything."""
    monkeypatch.delattr(one_step, "first_step")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(ValueError, match="a drafter with cores of its own needs at least 2 cores"):
        launch_bench("decoupled", [str(DEMO / "decoupled.yaml"), "--split-cores"])


def test_earlier_epoch_is_shown_only_on_request(tmp_path):
    earlier = Earlier(tmp_path)
    rollouts = [rollout(key, i) for i in range(2) for key in KEYS]
    earlier.keep(cast(DraftedLap, SimpleNamespace(lap=SimpleNamespace(rollouts=rollouts))))
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        earlier.show(True)
        assert all(open_index(index_path(tmp_path, key), key) for key in KEYS)
        earlier.show(False)
        assert not list(tmp_path.glob("*.index"))
