"""The requests that a resumed step has yet to generate, and the progress of those that run."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from engines.failures import Failures
from engines.rollout.moves import EngineView, RolloutView
from tasks.rollout import _left, _Watch
from tests.rollout.fakes import request


def test_stored_rollouts_are_not_generated_again():
    """The store would refuse a rollout that it has, or the step would count it twice."""
    requests = [(i % 2, request("p", 3, sample_index=i)) for i in range(4)]
    done = {requests[0][1].id, requests[3][1].id}
    assert _left(requests, done) == requests[1:3]
    assert _left(requests, set()) == requests


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
