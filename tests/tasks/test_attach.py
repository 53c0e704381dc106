"""The signature of a task names all that it needs. Without a live run, a task raises at once."""

import inspect
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from refrain.schemas.config import TrainConfig
from refrain.schemas.run import RunRef
from refrain.schemas.step import (
    HistoryReport,
    RewardedBatch,
    RolloutBatch,
    StepPlan,
    StepReport,
    TrainReport,
)
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.evaluate import report_evaluation
from refrain.tasks.history import index_history
from refrain.tasks.learn import save_checkpoint, train_policy
from refrain.tasks.report import draw_step, report_step, report_validation
from refrain.tasks.reward import reward
from refrain.tasks.rollout import rollout
from refrain.tasks.run.attach import RunNotLive, attach
from refrain.tasks.run.engines import Engines
from refrain.tasks.run.run_dir import claim_run_dir, made_known
from refrain.tasks.schedule import plan_validation, rank_and_group

NEEDS = {
    index_history: (int,),
    rank_and_group: (int, HistoryReport, tuple[int, ...]),
    plan_validation: (int, tuple[int, ...]),
    rollout: (StepPlan, PolicyWeights, Engines),
    reward: (RolloutBatch,),
    train_policy: (RewardedBatch,),
    save_checkpoint: (StepReport,),
    report_step: (
        HistoryReport,
        StepPlan,
        RolloutBatch,
        RewardedBatch,
        TrainReport,
        StepReport | None,
    ),
    draw_step: (StepReport, RolloutBatch),
    report_validation: (RolloutBatch, RewardedBatch),
    report_evaluation: (RolloutBatch, RewardedBatch),
}
"""Types of each task's parameters after the run."""


@pytest.mark.parametrize("task", NEEDS, ids=lambda task: task.name)
async def test_task_raises_when_its_run_has_ended(task, tmp_path):
    parameters = inspect.signature(task.fn).parameters.values()
    assert tuple(parameter.annotation for parameter in parameters) == (RunRef, *NEEDS[task])
    nothing = [None] * len(NEEDS[task])
    run = ref(tmp_path / "gone", "127.0.0.1:9")
    with pytest.raises(RunNotLive, match=r"gone is not live: start it with refrain train --resume"):
        await task.fn(run, *nothing)


@pytest.fixture
def live_dir(tmp_path: Path) -> Iterator[Path]:
    """Return the directory of a run that this process holds."""
    values = {"model": {"path": "m"}, "data": {"train": ["d"]}, "runs_dir": tmp_path, "name": "it"}
    lock = claim_run_dir(TrainConfig.model_validate(values), resume=False)
    yield tmp_path / "it"
    lock.release()


def ref(run_dir: Path, address: str, namespace: str = "now") -> RunRef:
    return RunRef(
        run_dir=run_dir,
        working_dir=run_dir,
        ray_address=address,
        ray_namespace=namespace,
        first_version=0,
    )


def test_resumed_run_is_not_the_attached_one(live_dir: Path):
    before = ref(live_dir, "127.0.0.1:9", "before")
    with pytest.raises(RunNotLive, match=r"this reference is outdated.*live\.json"):
        attach(before)
    with (
        made_known(ref(live_dir, "127.0.0.1:9")),
        pytest.raises(RunNotLive, match="this reference is outdated"),
    ):
        attach(before)
    assert not (live_dir / "live.json").exists()


def test_attach_does_not_wait_for_lost_clusters(live_dir: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    gone = ref(live_dir, f"127.0.0.1:{port}")
    with made_known(gone), pytest.raises(ConnectionError, match="no Ray answers at"):
        attach(gone)
