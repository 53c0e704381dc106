"""When a task fails, Prefect shows how to fix the error and how to resume."""

import errno
import re
from pathlib import Path

import pytest

from refrain.engines.durable import disk_full
from refrain.engines.learn.trainer import TrainerError
from refrain.engines.reward import ScorerHangs
from refrain.engines.rollout.interface import (
    EngineDied,
    EngineFails,
    EngineGone,
    WeightsLost,
    WeightSyncError,
)
from refrain.engines.rollout.slow_policy import SlowPolicy
from refrain.engines.store.actor import StoreTimeout
from refrain.schemas.config import TrainConfig
from refrain.schemas.resume import OnResume, settings_of
from refrain.schemas.run import RunRef
from refrain.tasks.run.advice import TaskFailed, advise, with_advice
from refrain.tasks.run.ray_cluster import ray_files
from tests.learn.test_checkpoint import write

SETTINGS = settings_of(
    TrainConfig.model_validate({"model": {"path": "m"}, "data": {"train": ["d"]}})
)

FULL = disk_full(Path("runs"), "checkpoint global_step_4", 12, 4)


@pytest.mark.parametrize(
    ("error", "setting"),
    [
        (EngineDied(1, "killed"), "rollout.stall_timeout_s"),
        (EngineFails(1, "head_dim 48", "head_dim 48"), "model.dtype"),
        (EngineGone(0, "its node is dead"), "rollout.num_engines"),
        (WeightSyncError("engine 0 differs"), "rollout.canary_tolerance"),
        (WeightsLost("engine 2: is gone"), "pat.tp_degrees"),
        (TrainerError("rank 0 did not finish"), "trainer.timeout_s"),
        (SlowPolicy("SampleQueue took more than 60 s"), "pat.tp_degrees"),
        (ScorerHangs("the scorer stood still"), "reward.timeout_s"),
        (StoreTimeout("store (add_rollouts): no answer in 600 s"), "runs_dir"),
        (OSError(errno.ENOSPC, "No space left on device"), "trainer.keep_checkpoints"),
        (TrainerError(f"rank 0 failed in save: {FULL}"), "trainer.keep_checkpoints"),
    ],
)
def test_common_errors_come_with_advice(error, setting, tmp_path):
    advice = advise(error, tmp_path)
    assert advice is not None
    assert setting in advice
    advised = re.findall(r"\b(?:rollout|trainer|reward)\.\w+|runs_dir", advice)
    assert all(SETTINGS[name].on_resume is not OnResume.KEPT for name in advised), (
        "advises a setting that a resumed run cannot change"
    )


def test_a_full_disk_is_found_behind_other_errors(tmp_path):
    error = TrainerError("rank 0 failed in save")
    error.__cause__ = RuntimeError("[Errno 28] No space left on device")
    advice = advise(error, tmp_path) or ""
    assert re.search(rf"of the run, {tmp_path}, mounted at /\S*, has [\d,]+ MB free", advice)
    assert re.search(rf"{ray_files()}, mounted at /\S*, has [\d,]+ MB free", advice)


def test_other_errors_get_no_advice(tmp_path):
    assert advise(ValueError("says itself what is wrong"), tmp_path) is None


@pytest.mark.parametrize("begun", [True, False])
async def test_failed_task_explains_how_to_resume(begun, tmp_path):
    then = "Then start again: there is no checkpoint"
    if begun:
        write(tmp_path / "mine" / "checkpoints", 1)
        then = "Then resume from the last checkpoint"
    run = RunRef(
        run_dir=tmp_path / "mine",
        working_dir=tmp_path,
        ray_address="",
        ray_namespace="",
        first_version=0,
    )

    @with_advice
    async def dies(_):
        raise EngineDied(1, "killed")

    @with_advice
    async def refuses(_):
        raise ValueError("bad input")

    with pytest.raises(TaskFailed) as failed:
        await dies(run)
    assert "rollout engine 1 died: killed" in str(failed.value)
    assert f"{then}: refrain train --resume {tmp_path}/mine [SETTING=VALUE]" in str(failed.value)
    with pytest.raises(ValueError, match="bad input"):
        await refuses(run)
