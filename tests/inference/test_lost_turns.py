"""A real engine dies in the middle of conversations: another one goes on after their last answered
turn. At most one turn of each is drawn again, and no tool call is repeated."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from refrain.benchmarks.one_step import fetch
from refrain.engines.environment.client import EnvironmentClient
from refrain.engines.failures import Failures
from refrain.engines.gpus.placement import GpuPlacement
from refrain.engines.inference.engine.conversations import num_in_turn, waits
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.moves import RolloutView
from refrain.engines.store.actor import StoreClient, start_store
from refrain.schemas.environment import EnvironmentConfig, EnvironmentTask
from refrain.schemas.rollout import FinishedRollout, Generated, RequestId, Rollout, RolloutRequest
from refrain.tasks.rollout import _recovered
from refrain.tasks.run.environments import start_environments
from tests.inference.pace import PacedEngine, set_pace
from tests.inference.real import CONFIG, requests, weights_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]

SOURCE = '''
import time
from pathlib import Path

class Asks:
    """Asks again and again."""
    def reset(self, task):
        self.seed = task.seed
        self.number = 0
    def step(self, turn):
        with Path(__file__).with_name("calls").open("a") as file:
            file.write("x")
        time.sleep(0.3)
        self.number += 1
        return f"{self.seed + self.number}+{self.number}=?"
    def end(self, reason):
        return 0.5
'''
NUM_CONVERSATIONS, MAX_TURNS = 16, 5
STEP_S = 0.05


class NotingEngine(RayEngine):
    """An engine that notes which tokens each request brings along."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.came: dict[RequestId, Generated | None] = {}

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self.came |= {request.id: request.generated for request in requests}
        await super().submit(requests)


class Laps:
    """The same conversations on the same engines, several times."""

    def __init__(self, engines: Sequence[NotingEngine], run: Any, directory: Path) -> None:
        self.engines, self._run = engines, run
        self._calls = directory / "calls"
        self._calls.touch()
        self._coordinator = Coordinator(engines)

    async def take(
        self, weights: Any, todo: Sequence[RolloutRequest], watch: Any = None
    ) -> tuple[dict[RequestId, Rollout], int]:
        """Return the conversations, and the number of calls of the environment."""
        before, told = len(self._calls.read_text()), list[FinishedRollout]()
        for engine in self.engines:
            engine.came.clear()

        async def keep(rollouts: Sequence[FinishedRollout]) -> None:
            told.extend(rollouts)

        await self._coordinator.load_weights(weights)
        for engine in self.engines:
            await set_pace(engine, STEP_S)
        stage = self._coordinator.roll_out(
            [(at % 2, request) for at, request in enumerate(todo)],
            keep,
            watch,
            recover=partial(_recovered, self._run, weights.policy_version),
        )
        await asyncio.wait_for(stage, 300)
        # Wait for an engine that is restarting.
        await self._coordinator.load_weights(weights)
        rollouts = {rollout.id: rollout for rollout in await fetch(told)}
        assert len(rollouts) == len(told) == len(todo)
        await EnvironmentClient(self._run.config.environment).finished(list(rollouts))
        return rollouts, len(self._calls.read_text()) - before


async def test_an_engine_that_dies_costs_one_turn_of_a_conversation_at_most(
    ray_cluster, learner, prompts, tmp_path: Path
) -> None:
    assert ray_cluster.is_initialized()
    (tmp_path / "asks.py").write_text(SOURCE)
    environment = EnvironmentConfig(path=tmp_path / "asks.py", max_turns=MAX_TURNS, processes=1)
    config = CONFIG.model_copy(update={"environment": environment})
    todo = [
        replace(one, task=EnvironmentTask(one.id.prompt_key, "asks", "", {}, seed=number))
        for number, one in enumerate(requests(prompts[: NUM_CONVERSATIONS // 4]))
    ]
    weights = weights_of(learner, prompts)
    async with AsyncExitStack() as stack:
        store = start_store(tmp_path / "run.duckdb", "lost turns")
        stack.callback(ray.kill, store)
        await start_environments(config, stack, GpuPlacement(), "lost turns")
        engines = [
            NotingEngine(20 + i, config.engine, 0, engine_class=PacedEngine) for i in range(2)
        ]
        await asyncio.gather(*(engine.start() for engine in engines))
        for index, engine in enumerate(engines):
            engine.index = index
            stack.push_async_callback(engine.shutdown)
        run = SimpleNamespace(
            inputs=SimpleNamespace(environment=SimpleNamespace(goes_on=True)),
            config=config,
            failures=Failures(tmp_path),
            store=StoreClient(store).call,
        )
        laps, had = Laps(engines, run, tmp_path), dict[RequestId, Generated]()

        def kill(view: RolloutView) -> None:
            here = [id for one in view.engines if one.engine == 1 for id in one.progress]
            if had or not here:
                return
            copies = ray.get(engines[1].actor.copy.remote(here), timeout=60)
            if any(len(copy.generated.turns) >= 2 for copy in copies if copy.generated):
                had.update((copy.id, copy.generated) for copy in copies if copy.generated)
                ray.kill(engines[1].actor)

        expected, num_calls = await laps.take(weights, todo)
        engines[0].came.clear()
        found, num_calls_again = await laps.take(weights, todo, kill)
    assert {id: list(one.generated.token_ids) for id, one in found.items()} == {
        id: list(one.generated.token_ids) for id, one in expected.items()
    }
    assert num_calls_again == num_calls
    moved = [id for id in had if id in engines[0].came]
    assert max(len(had[id].turns) for id in moved) >= 2
    drawn_again = {id: sampled(had[id]) - sampled(engines[0].came[id]) for id in moved}
    print(f"drawn again: {sum(drawn_again.values())} of {sum(map(sampled, had.values()))} tokens")
    assert all(num <= last_turn(had[id]) for id, num in drawn_again.items()), drawn_again


def sampled(generated: Generated | None) -> int:
    return generated.num_sampled if generated else 0


def last_turn(generated: Generated) -> int:
    """Return the tokens of the turn that goes on, or that waits for its answer."""
    return generated.turns[-1].num_sampled if waits(generated) else num_in_turn(generated)
