"""The requests that a resumed step has yet to generate, and the progress of those that run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refrain.engines.environment.client import EnvironmentClient
from refrain.engines.failures import Failures
from refrain.engines.rollout.moves import EngineView, RolloutView
from refrain.engines.store.turns import RecordedTurn
from refrain.schemas.environment import EnvironmentConfig
from refrain.schemas.rollout import FinishedRollout, FinishReason, Generated, Turn, VersionSpan
from refrain.tasks.rollout import _continued, _left, _Watch
from tests.rollout.fakes import request


def test_stored_rollouts_are_not_generated_again():
    """The store would refuse a rollout that it has, or the step would count it twice."""
    requests = [(i % 2, request("p", 3, sample_index=i)) for i in range(4)]
    done = {requests[0][1].id, requests[3][1].id}
    assert _left(requests, done) == requests[1:3]
    assert _left(requests, set()) == requests


def test_recorded_turns_of_the_stages_version_go_on() -> None:
    """Of another version, only those of a deferred request, or if the run mixes versions."""
    planned = request("p", 3)
    deferred = planned.deferred()
    turns = [
        RecordedTurn(
            planned.id,
            number,
            Generated([number, 9], [-0.5], (VersionSpan(2, 1),), turns=(Turn(1, 1, ended_s=1e9),)),
            "{}",
        )
        for number in range(2)
    ]
    for given, version, mixes in ((planned, 2, False), (planned, 3, True), (deferred, 3, False)):
        generated = _continued(given, turns, version, mixes=mixes).generated
        assert generated is not None
        # The last turn is answered again: by the record.
        assert list(generated.token_ids) == [0, 9, 1]
        assert [turn.num_observed for turn in generated.turns] == [1, None]
        assert [turn.ended_s for turn in generated.turns] == [None, None]
        assert generated.spans == (VersionSpan(2, 2),)
    assert _continued(planned, turns, 3, mixes=False) is planned
    assert _continued(planned, [], 2, mixes=False) is planned


@pytest.mark.parametrize("on_error", ["stop", "zero", "leave_out"])
async def test_a_failed_conversation_that_stops_the_run_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    """Otherwise --resume would find it finished, and train on it."""

    async def failures(_: EnvironmentClient) -> dict[str, str]:
        return {"train/1/p/0": "the service is down"}

    async def add_finished(rollouts: list[FinishedRollout], _: int) -> None:
        stored.extend(rollouts)

    stored: list[FinishedRollout] = []
    monkeypatch.setattr(EnvironmentClient, "failures", failures)
    config = SimpleNamespace(environment=EnvironmentConfig(path=Path("x.py"), on_error=on_error))
    run: Any = SimpleNamespace(
        config=config, store_client=SimpleNamespace(add_finished=add_finished)
    )
    plan: Any = SimpleNamespace(epoch=0)
    unused: Any = None
    watch = _Watch(run, unused, plan, unused, 0, lambda: None)
    failed = FinishedRollout(request("p", 3).id, 0, FinishReason.FAILED, 3, 0, 0, 0, b"", 0)
    if on_error == "stop":
        with pytest.raises(ValueError, match=r"1 conversations failed, .*p/0: the service is down"):
            await watch.keep([failed])
        assert stored == []
    else:
        await watch.keep([failed])
        assert stored == [failed]


def test_progress_has_the_predicted_end(tmp_path, record_failures: list):
    """A prediction that fails is shown as unknown, and the stage goes on."""
    shown: list[Any] = []
    run: Any = SimpleNamespace(
        failures=Failures(tmp_path), progress=SimpleNamespace(rolling=shown.append)
    )
    engines: Any = SimpleNamespace(living=(0,))
    page: Any = SimpleNamespace(show=lambda _: None)
    plan: Any = SimpleNamespace(split="train", step=3)
    watch = _Watch(run, engines, plan, page, 2, lambda: None)
    view = RolloutView(1.0, (EngineView(0, {request("p", 3).id: 7}),), 1, 2)
    watch.show(view)
    watch.end = SimpleNamespace(left_s=lambda view: 40.0 - view.elapsed_s)
    watch.show(replace(view, elapsed_s=2.0))
    watch.show(replace(view, elapsed_s=2.1))  # Too soon to be shown.
    watch.end = SimpleNamespace(left_s=lambda _: 1 / 0)
    watch.show(replace(view, elapsed_s=3.0))
    assert [(each.num_finished, each.left_s) for each in shown] == [(3, None), (3, 38.0), (3, None)]
    assert len(record_failures) == 1
    record_failures.clear()
