"""A run whose engines, trainer and scorer only keep time. Everything else is real.

real    flow, tasks, coordinator, store, MLflow, Prefect's pages, pictures
stubs   engines finish rollouts at a steady pace, training and scoring take no time
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from refrain.benchmarks.stand_ins import NUM_ENGINES, MadeUpEngine, made_up_prompts
from refrain.engines.data.loader import PromptLoader
from refrain.engines.failures import Failures
from refrain.engines.learn.checkpoint import CheckpointState, checkpoints_dir, write_checkpoint
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.interface import EngineEvents
from refrain.engines.store.actor import Batch, StoreClient, StoredRows, count_rows
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store
from refrain.engines.tracking.tracker import Tracker
from refrain.schemas.config import TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.rollout import RolloutRequest
from refrain.schemas.run import RunRef
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.run.artifacts import StepPages
from refrain.tasks.run.attach import Run, attached
from refrain.tasks.run.engines import Engines
from refrain.tasks.run.live import LiveRun
from refrain.tasks.run.milestones import Milestones
from refrain.tasks.run.preflight import Inputs

_EVENT_S = 0.05
"""Seconds between two reports of an engine."""
_NUM_WORDS = 30_000


class StubEngine(MadeUpEngine):
    """Finishes `rollouts_per_s` rollouts, first come, first served."""

    def __init__(self, index: int, rollouts_per_s: float) -> None:
        super().__init__(index, _NUM_WORDS)
        self._rollouts_per_s = rollouts_per_s
        self._last_s = 0.0
        self._owed = 0.0
        self.ended_s = 0.0
        """Time at which its queue became empty, by `time.perf_counter`."""

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        await super().submit(requests)
        self._last_s, self._owed = time.perf_counter(), 0.0

    async def next_events(self) -> EngineEvents:
        await asyncio.sleep(_EVENT_S)
        now_s = time.perf_counter()
        self._owed += (now_s - self._last_s) * self._rollouts_per_s
        self._last_s = now_s
        finished = self._finish(int(self._owed), shortest=0.5)
        self._owed -= len(finished)
        if finished and not self._queue:
            self.ended_s = now_s
        rows = rollout_rows(finished)
        told = tuple(
            replace(rollout.without_tokens(row), rows=rows) for row, rollout in enumerate(finished)
        )
        return EngineEvents(told, dict.fromkeys((r.id for r in self._queue), 1))


class LocalStore(StoreClient):
    """A store in this process."""

    def __init__(self, path: Path) -> None:
        super().__init__(None)
        self._store = Store(path)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(getattr(self._store, method), *args, **kwargs)

    async def rows(self, method: str, *args: Any, **kwargs: Any) -> StoredRows:
        table = await self.call(method, *args, **kwargs)
        return StoredRows(table, count_rows(table))

    async def _keep(self, batches: list[Batch]) -> list[str]:
        for table, selected, epoch in batches:
            await self.call("add_rollouts", table.take(selected), epoch)
        return ["" for _ in batches]


class StubTrainer:
    def __init__(self, config: TrainConfig) -> None:
        self._directory = checkpoints_dir(config)

    async def train_step(self, rows: Any) -> dict[str, float]:
        assert rows is not None
        return {"actor/pg_loss": 0.0, "actor/entropy": 1.0}

    async def publish(self, policy_version: int) -> PolicyWeights:
        return PolicyWeights(policy_version, b"", ())

    async def save(self, step: int, loader_state: dict[str, Any]) -> Path:
        state = CheckpointState(step=step, policy_version=step, loader_state=loader_state)
        return write_checkpoint(self._directory, state, lambda _: None)


class StubScorers:
    async def score(self, unscored: StoredRows, prompts: Mapping[str, Prompt]) -> pa.Table:
        assert prompts
        rows = unscored.reference
        if not isinstance(rows, pa.Table):
            rows = await rows
        rewards = pa.array(np.arange(rows.num_rows) % 2, pa.float64())
        extra = pa.array(["{}"] * rows.num_rows)
        return (
            rows.select(["prompt_key", "sample_index"])
            .append_column("reward", rewards)
            .append_column("extra", extra)
        )


class StubDrafters:
    async def take_counts(self) -> dict[str, Any]:
        return {}


class StubTokenizer:
    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class Silence:
    """Progress of a run that nobody watches."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def phase(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)

    def rolling(self, *_: Any) -> None:
        pass

    def step(self, *_: Any) -> None:
        pass


@asynccontextmanager
async def hollow_run(
    config: TrainConfig,
    store: StoreClient,
    num_steps: int,
    rollouts_per_s: float,
    tracking_uri: str | None,
) -> AsyncGenerator[tuple[LiveRun, list[StubEngine]]]:
    """Yield a run of this process, and its engines. Tasks can find the run while this lasts."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    engines: Any = [StubEngine(i, rollouts_per_s / NUM_ENGINES) for i in range(NUM_ENGINES)]
    ref = RunRef(
        run_dir=config.run_dir.absolute(),
        working_dir=Path.cwd(),
        ray_address="",
        ray_namespace="",
        first_version=0,
    )
    progress: Any = Silence()
    failures = Failures(config.run_dir, progress.warn)
    stubs: dict[str, Any] = {
        "trainer": StubTrainer(config),
        "scorers": StubScorers(),
        "history": None,
    }
    run = Run(
        ref,
        config=config,
        inputs=_inputs(config, num_steps),
        store_client=store,
        tracker=Tracker(config, tracking_uri, failures),
        pages=StepPages(config.run_dir, config.name, failures),
        progress=progress,
        failures=failures,
        **stubs,
    )
    drafters: Any = StubDrafters()
    coordinator = Coordinator(engines, log=progress.phase)
    made = Engines(coordinator, drafters, 0)
    weights = PolicyWeights(0, b"", ())
    milestones = Milestones(weights, config.staleness, num_steps, made.queued)
    await coordinator.start()
    try:
        with attached(run):
            yield LiveRun(run, made, milestones), engines
    finally:
        await coordinator.shutdown()
        run.tracker.close("FINISHED")
        run.pages.close()
        failures.close()


def _inputs(config: TrainConfig, num_steps: int) -> Inputs:
    """Return inputs with the same prompts in every step, one step per epoch."""
    prompts = made_up_prompts(config, _NUM_WORDS)
    loader = PromptLoader(
        list(prompts),
        prompts_per_step=config.prompts_per_step,
        num_epochs=num_steps,
        shuffle=True,
        seed=0,
    )
    return Inputs({}, prompts, loader, StubTokenizer())
