"""The order of tasks in a run. The flows run without Prefect, with tasks that do nothing."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import refrain.flows.step
import refrain.flows.train
from refrain.engines.bounded import together
from refrain.engines.gpus.gpu_sharing import Role, Turns
from refrain.schemas.config import TrainConfig
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.run.milestones import Milestone, Milestones

NUM_STEPS = 5
TASKS = ("index_history", "rank_and_group", "reward", "draw_step")


class Stage:
    """A run of five steps that validates each policy version. Validations wait for
    `may_validate`."""

    def __init__(
        self,
        staleness: int,
        monkeypatch: pytest.MonkeyPatch,
        first_version: int = 0,
        *,
        trainer_leaves: bool = False,
    ) -> None:
        given = {"model": {"path": "m"}, "data": {"train": ["d"], "validation": ["v"]}}
        given |= {"staleness": staleness, "validate_every_steps": 1, "algorithm": {"tis_cap": 2.0}}
        self.config = TrainConfig.model_validate(given)
        self.done: list[str] = []
        self.may_validate = asyncio.Event()
        self.save_s = 0.0
        weights = PolicyWeights(first_version, b"", ())
        queued = Milestone[None](first_version, None)
        self.reached = Milestones(weights, self.config.staleness, NUM_STEPS, queued, validates=True)
        run = SimpleNamespace(
            ref=SimpleNamespace(first_version=first_version),
            config=self.config,
            inputs=SimpleNamespace(loader=SimpleNamespace(num_steps=NUM_STEPS)),
        )
        self.live: Any = SimpleNamespace(
            run=run,
            milestones=self.reached,
            engines=SimpleNamespace(
                living=(0,), turns=self._turns(), trainer_leaves=trainer_leaves
            ),
        )
        for name in TASKS:
            monkeypatch.setattr(refrain.flows.step, name, self._task(name))
        monkeypatch.setattr(refrain.flows.step, "rank_and_group", self._plan)
        monkeypatch.setattr(refrain.flows.step, "rollout", self._roll_out)
        monkeypatch.setattr(refrain.flows.step, "train_policy", self._train)
        monkeypatch.setattr(refrain.flows.step, "report_step", self._report)
        monkeypatch.setattr(refrain.flows.step, "save_checkpoint", self._save)
        monkeypatch.setattr(refrain.flows.step, "this_call", lambda: None)
        monkeypatch.setattr(refrain.flows.train, "call_numbered", self._call)
        monkeypatch.setattr(refrain.flows.train, "rl_step", refrain.flows.step.rl_step.fn)
        monkeypatch.setattr(refrain.flows.train, "validation", self._validation)

    def _turns(self) -> Turns:
        """Return turns that record who enters the GPUs. With staleness nobody takes turns."""
        if self.config.staleness:
            return Turns({}, Role.ENGINES)
        return Turns({role: _Owner(role, self.done) for role in Role}, Role.TRAINER)

    def _task(self, name: str) -> Callable[..., Any]:
        async def body(*_: Any) -> Any:
            await asyncio.sleep(0)
            return SimpleNamespace(name=name)

        return body

    async def _call(self, subflow: Any, number: int, *args: Any, wait_for: Any) -> Any:
        """Assert that a call waits for the step that it needs, unless that was taken before this
        process started."""
        needs = number if subflow == self._validation else number - 1 - self.config.staleness
        first = self.live.run.ref.first_version
        assert (wait_for is None) == (needs <= first)
        return await subflow(*args)

    async def _plan(self, _: Any, step: int, *__: Any) -> Any:
        first = self.live.run.ref.first_version
        version = max(first, step - 1 - self.config.staleness)
        return SimpleNamespace(step=step, policy_version=version)

    async def _roll_out(self, _: Any, plan: Any, *__: Any) -> Any:
        await self.reached.queued.reach(plan.step, None)
        return SimpleNamespace(step=plan.step)

    async def _train(self, *_: Any) -> Any:
        step = self.reached.published.reached + 1
        self.done.append(f"trained {step}")
        return SimpleNamespace(weights=PolicyWeights(step, b"", ()))

    async def _report(self, _: Any, __: Any, plan: Any, *___: Any) -> Any:
        return SimpleNamespace(step=plan.step)

    async def _save(self, _: Any, report: Any) -> None:
        await asyncio.sleep(self.save_s)
        self.done.append(f"saved {report.step}")

    async def _validation(self, version: int, *_: Any) -> None:
        await self.may_validate.wait()
        self.done.append(f"validated {version}")


class _Owner:
    def __init__(self, role: Role, done: list[str]) -> None:
        self.role, self.done = role, done

    async def leave_gpus(self) -> None:
        await asyncio.sleep(0)

    async def enter_gpus(self) -> None:
        await asyncio.sleep(0)
        self.done.append(f"{self.role.value} enter")


@pytest.mark.parametrize("leaves", [True, False])
async def test_trainer_saves_before_leaving_its_gpus(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that must leave the GPUs saves before the engines enter. Otherwise it saves a step
    while the next one generates."""
    stage = Stage(0, monkeypatch, trainer_leaves=leaves)
    stage.save_s = 0.01
    stage.may_validate.set()
    async with together() as tasks:
        tasks.create_task(refrain.flows.train.take_steps(stage.live))
    for step in range(1, NUM_STEPS):
        saved, trained = (stage.done.index(f"{what} {step}") for what in ("saved", "trained"))
        assert ("engines enter" in stage.done[trained:saved]) is not leaves


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("first_version", [0, 2])
async def test_a_checkpoint_is_saved_when_what_cannot_be_validated_from_it_is(
    staleness: int, first_version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(staleness, monkeypatch, first_version)
    async with together() as tasks:
        tasks.create_task(refrain.flows.train.take_steps(stage.live))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not [done for done in stage.done if done.startswith(("saved", "validated"))]
        stage.may_validate.set()
    for step in range(first_version + 1, NUM_STEPS + 1):
        before = stage.done[: stage.done.index(f"saved {step}")]
        wanted = [f"validated {version}" for version in range(first_version, step)]
        assert [name for name in before if name.startswith("validated")][: len(wanted)] == wanted
    assert f"validated {NUM_STEPS}" in stage.done
