"""After a crash a run resumes by itself; other errors end it."""

import asyncio
import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from refrain.engines.actors import ActorError, ActorGone, NoAnswer
from refrain.engines.learn.teacher.client import TeacherError
from refrain.engines.learn.trainer import TrainerError
from refrain.engines.learn.training_samples import StalenessError
from refrain.engines.reward import ScorerHangs
from refrain.engines.rollout.interface import (
    EngineDied,
    EngineFails,
    EngineGone,
    WeightsLost,
    WeightSyncError,
)
from refrain.engines.store.actor import StoreTimeout
from refrain.flows import train as flow
from refrain.schemas.config import TrainConfig
from refrain.tasks.run.advice import TaskFailed
from refrain.tasks.run.crashes import CRASHES_FILE, is_crash, note_crash, read_crashes
from refrain.tasks.run.plan import RunPlan
from refrain.tasks.run.ray_cluster import RayDied


def caused(error: Exception, *causes: BaseException) -> Exception:
    """Return `error` with a chain of causes: each is caused by the next."""
    told: BaseException = error
    for cause in causes:
        told.__cause__ = cause
        told = cause
    return error


GONE = ActorGone("trainer rank 0", "failed in train_step: ActorDiedError")
GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
TEACHER = TeacherError("the teacher at http://host:8000/v1 gave no answer (Connection reset)")
CANCELLED = asyncio.CancelledError()
CRASHES = {
    "ray": RayDied("Ray has died under the run: its raylet was killed or crashed"),
    "node": EngineGone(0, "its node is dead"),
    "engine": EngineDied(1, "killed"),
    "engine in a task": caused(TaskFailed("advice"), EngineDied(1, "killed")),
    "late call": caused(
        TrainerError("late"), NoAnswer("trainer rank 1", "is late"), TimeoutError(), CANCELLED
    ),
    "rank": caused(TrainerError(str(GONE)), GONE),
    "silent rank": caused(TrainerError("late"), NoAnswer("trainer rank 1", "is late")),
    "other rank": caused(TrainerError("x"), ActorError("trainer rank 0", "failed", cause=GLOO)),
    "scorer": caused(ScorerHangs("the scorer stood still"), NoAnswer("the scorer", "is late")),
    "store's process": ActorDiedError(),
    "weights of a dead rank": caused(TaskFailed("advice"), WeightsLost("engine 2: is gone")),
    "store": StoreTimeout("store (add_step): no answer in 600 s"),
}
RAISED = {
    "setting": ValueError("bad"),
    "setting in a task": caused(TaskFailed("advice"), ValueError("bad")),
    "scorer's own": caused(
        TaskFailed("x"), ValueError("response 3: the scorer raised"), ActorError("the scorer", "")
    ),
    "canary": WeightSyncError("engine 0 differs"),
    "canary in a task": caused(TaskFailed("advice"), WeightSyncError("engine 0 differs")),
    "engine that always dies": EngineFails(1, "head_dim 48", "head_dim 48"),
    "staleness": caused(
        TrainerError("x"), ActorError("trainer rank 0", "failed", cause=StalenessError("old"))
    ),
    "raised in an actor": caused(
        TrainerError("x"), ActorError("trainer rank 0", "failed", cause=KeyError("loss"))
    ),
    "silent teacher": caused(
        TrainerError("x"), ActorError("trainer rank 0", f"failed: {TEACHER}", cause=TEACHER)
    ),
    "raised by ray's task": RayTaskError("f", "traceback", KeyError("x")),
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "disk behind an engine": caused(EngineDied(0, "x"), OSError(errno.ENOSPC, "No space left")),
    "unknown": RuntimeError("a bug"),
    "interrupt": KeyboardInterrupt(),
    "cancelled": asyncio.CancelledError(),
    "dead ray behind an interrupt": caused(RayDied("gone"), KeyboardInterrupt()),
}


@pytest.mark.parametrize("what", CRASHES)
def test_run_resumes_after_a_crash(what: str) -> None:
    assert is_crash(CRASHES[what])


@pytest.mark.parametrize("what", RAISED)
def test_repeatable_errors_are_no_crash(what: str) -> None:
    assert not is_crash(RAISED[what])


class Tries:
    """Replaces the runs of a flow: each try ends with the next of `ends`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: BaseException | None) -> None:
        self.ends, self.made = list(ends), []
        monkeypatch.setattr(flow, "_train", self.make)
        monkeypatch.setattr(flow, "plan_again", lambda plan: replace(plan, resume=True))

    async def make(self, plan: RunPlan, started: float, goes_on: str) -> str:
        del started
        self.made.append((plan.resume, goes_on.partition(";")[0]))
        plan.config.run_dir.mkdir(parents=True, exist_ok=True)
        (plan.config.run_dir / "config.json").touch()
        if end := self.ends.pop(0):
            raise end
        return "summary"


def plan(tmp_path: Path, max_failures: int, *, resume: bool = False) -> RunPlan:
    """Return a plan whose inputs nobody reads."""
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": ["d"]}}
    trainer = {"max_failures": max_failures}
    config = TrainConfig.model_validate(values | {"runs_dir": tmp_path, "trainer": trainer})
    unread: Any = None
    return RunPlan(config, inputs=unread, memory=unread, addresses=unread, resume=resume)


async def test_each_try_behind_the_first_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = Tries(monkeypatch, CRASHES["rank"], CRASHES["ray"], None)
    given = plan(tmp_path, 2)
    assert await flow._train_on(given) == "summary"
    why = [
        f"crashed after step 0: {type(error).__name__}"
        for error in (CRASHES["rank"], CRASHES["ray"])
    ]
    assert [resume for resume, _ in tries.made] == [False, True, True]
    assert all(told.startswith(why) for (_, told), why in zip(tries.made, ["", *why], strict=True))
    assert [crash.error for crash in read_crashes(given.config.run_dir)] == [
        f"{type(error).__name__}: {error}" for error in (CRASHES["rank"], CRASHES["ray"])
    ]


@pytest.mark.parametrize("max_failures", [0, 1, 3])
async def test_the_last_crash_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_failures: int
) -> None:
    tries = Tries(monkeypatch, *[EngineDied(0, "killed") for _ in range(9)])
    with pytest.raises(EngineDied):
        await flow._train_on(plan(tmp_path, max_failures))
    assert len(tries.made) == max_failures + 1


@pytest.mark.parametrize(
    "end", [ValueError("bad"), KeyboardInterrupt(), WeightSyncError("differs")]
)
async def test_others_are_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    tries = Tries(monkeypatch, CRASHES["ray"], end)
    with pytest.raises(type(end)):
        await flow._train_on(plan(tmp_path, 3, resume=True))
    assert len(tries.made) == 2


async def test_a_crash_on_the_way_out_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal reaches all processes of the run, so Ray dies too."""
    tries = Tries(monkeypatch, None, None)

    async def cancelled(*given: Any) -> None:
        await tries.make(*given)
        try:
            await asyncio.sleep(60)
        finally:
            raise RayDied("gone")

    monkeypatch.setattr(flow, "_train", cancelled)
    run = asyncio.create_task(flow._train_on(plan(tmp_path, 3)))
    await asyncio.sleep(0.05)
    run.cancel()
    with pytest.raises(RayDied):
        await run
    assert len(tries.made) == 1


async def test_a_run_that_has_not_begun_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise CRASHES["ray"]

    monkeypatch.setattr(flow, "_train", fails)
    with pytest.raises(RayDied):
        await flow._train_on(plan(tmp_path, 3))
    assert not (tmp_path / "run").exists()


def test_a_crash_is_in_the_record(tmp_path: Path) -> None:
    told = note_crash(tmp_path, EngineDied(1, "killed\nand more"), num_left=3)
    assert told == (
        "crashed after step 0: EngineDied: rollout engine 1 died: killed; "
        "resuming from the last checkpoint (2 more allowed)"
    )
    note_crash(tmp_path, RayDied("gone"), num_left=2)
    assert [crash.step for crash in read_crashes(tmp_path)] == [0, 0]
    (tmp_path / CRASHES_FILE).write_text("{")
    with pytest.raises(ValueError, match=CRASHES_FILE):
        read_crashes(tmp_path)
