"""A run whose engines, trainer and scorer do nothing but keep time; all the rest is real.

real    flow, tasks, coordinator, store, MLflow, Prefect's pages, pictures
hollow  engines yield rollouts at a steady pace, training and scoring take no time
"""

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from engines.data.loader import PromptLoader
from engines.learn.checkpoint import CheckpointState, checkpoints_dir, write_checkpoint
from engines.rollout.coordinator import Coordinator
from engines.rollout.interface import EngineEvents
from engines.store.actor import StoreClient, StoredRows, count_rows
from engines.store.rows import rollout_rows
from engines.store.store import Store
from engines.tracking.tracker import Tracker
from schemas.config import TrainConfig
from schemas.counts import DraftingCounts
from schemas.data import Prompt
from schemas.rollout import FinishReason, Generated, Rollout, RolloutRequest, VersionSpan
from schemas.run import RunRef
from schemas.weights import PolicyWeights
from tasks.run.artifacts import StepPages
from tasks.run.attach import Run, attached
from tasks.run.engines import Engines
from tasks.run.live import LiveRun
from tasks.run.milestones import Milestones
from tasks.run.preflight import Inputs

NUM_ENGINES = 2
GROUP_SIZE = 8
PROMPT_TOKENS = 64
_EVENT_S = 0.05
"""Seconds between two reports of an engine."""
_STEP_COSTS = (1e-2, 1e-4, 1e-8, 1e-4, 1e-5)
"""Seconds that a hollow engine claims to have measured; savings of drafts are counted with them."""


class HollowEngine:
    """Finishes `rollouts_per_s` rollouts of up to `num_tokens` tokens, first come, first served."""

    tp_degree = 1

    def __init__(self, index: int, rollouts_per_s: float, num_tokens: int) -> None:
        self.index = index
        self._rollouts_per_s, self._num_tokens = rollouts_per_s, num_tokens
        self._queue: list[RolloutRequest] = []
        self._version = 0
        self._last_s = 0.0
        self._owed = 0.0
        self._rng = np.random.default_rng(index)
        self.ended_s = 0.0
        """Moment at which it had nothing left, by `time.perf_counter`."""

    async def start(self) -> None:
        pass

    async def shutdown(self) -> None:
        self._queue.clear()

    async def load_weights(self, weights: PolicyWeights) -> float:
        self._version = weights.policy_version
        return 0.0

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._queue += requests
        self._last_s, self._owed = time.perf_counter(), 0.0

    async def take_drafting_counts(self) -> DraftingCounts:
        return DraftingCounts(num_steps=1, num_drafting_steps=1, step_costs=_STEP_COSTS)

    async def next_events(self) -> EngineEvents:
        await asyncio.sleep(_EVENT_S)
        now_s = time.perf_counter()
        self._owed += (now_s - self._last_s) * self._rollouts_per_s
        self._last_s = now_s
        num = min(int(self._owed), len(self._queue))
        self._owed -= num
        done, self._queue = self._queue[:num], self._queue[num:]
        if done and not self._queue:
            self.ended_s = now_s
        finished = [self._finish(request) for request in done]
        rows = rollout_rows(finished)
        told = tuple(
            replace(rollout.without_tokens(row), rows=rows) for row, rollout in enumerate(finished)
        )
        return EngineEvents(told, dict.fromkeys((r.id for r in self._queue), 1))

    def _tokens(self, num_tokens: int) -> bytes:
        return self._rng.integers(0, 30_000, num_tokens).astype(np.int32).tobytes()

    def _finish(self, request: RolloutRequest) -> Rollout:
        num_tokens = int(self._rng.integers(self._num_tokens // 2, self._num_tokens + 1))
        cut = num_tokens == self._num_tokens
        generated = Generated(
            token_ids=array("i", self._tokens(num_tokens)),
            inference_logprobs=array("f", [-1.0]) * num_tokens,
            spans=(VersionSpan(self._version, num_tokens),),
            num_draft_tokens=num_tokens,
            num_accepted_tokens=int(self._rng.integers(0, num_tokens)),
            num_verifications=num_tokens // 2,
        )
        reason = FinishReason.LENGTH if cut else FinishReason.STOP
        now_s = time.time()
        return Rollout(request, generated, reason, self.index, now_s - 1.0, now_s)


class LocalStore(StoreClient):
    """A store in this process."""

    def __init__(self, path: Path) -> None:
        self._store = Store(path)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(getattr(self._store, method), *args, **kwargs)

    async def rows(self, method: str, *args: Any) -> StoredRows:
        table = await self.call(method, *args)
        return StoredRows(table, count_rows(table))

    async def _keep(self, reference: pa.Table, selected: list[int], epoch: int) -> str:
        await self.call("add_rollouts", reference.take(selected), epoch)
        return ""


class HollowTrainer:
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


class HollowScorers:
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


class HollowDrafters:
    async def take_counts(self) -> dict[str, Any]:
        return {}


class HollowTokenizer:
    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class Silence:
    """A run's progress that nobody watches."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def phase(self, text: str) -> None:
        self.said.append(text)

    def rolling(self, *_: Any) -> None:
        pass

    def step(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


def hollow_config(runs_dir: Path, name: str, num_rollouts: int, num_tokens: int) -> TrainConfig:
    """Config of a run whose steps have so many rollouts of up to so many tokens."""
    return TrainConfig.model_validate(
        {
            "name": name,
            "runs_dir": runs_dir,
            "prompts_per_step": num_rollouts // GROUP_SIZE,
            "model": {"path": "none"},
            "data": {
                "train": ["none"],
                "max_prompt_tokens": PROMPT_TOKENS,
                "max_response_tokens": num_tokens,
            },
            "rollout": {"num_engines": NUM_ENGINES, "group_size": GROUP_SIZE},
            "drafting": {"enabled": False},
            "trainer": {"save_every_steps": 10_000},
        }
    )


@asynccontextmanager
async def hollow_run(
    config: TrainConfig,
    store: StoreClient,
    num_steps: int,
    rollouts_per_s: float,
    tracking_uri: str | None,
) -> AsyncGenerator[tuple[LiveRun, list[HollowEngine]]]:
    """A run whose tasks find it while this lasts."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    num_tokens = config.data.max_response_tokens
    engines = [
        HollowEngine(i, rollouts_per_s / NUM_ENGINES, num_tokens) for i in range(NUM_ENGINES)
    ]
    progress = Silence()
    coordinator: Any = Coordinator(engines)
    tracker = Tracker(config, tracking_uri, progress.phase)
    hollow: dict[str, Any] = {
        "trainer": HollowTrainer(config),
        "scorers": HollowScorers(),
        "history": None,
    }
    run = Run(
        _ref(config),
        config=config,
        inputs=_inputs(config, num_steps),
        store_client=store,
        tracker=tracker,
        pages=StepPages(config.run_dir, config.name, progress.phase),
        progress=progress,
        **hollow,
    )
    drafters: Any = HollowDrafters()
    made = Engines(coordinator, drafters, 0)
    weights = PolicyWeights(0, b"", ())
    milestones = Milestones(weights, config.max_staleness, num_steps, made.queued)
    await coordinator.start()
    try:
        with attached(run):
            yield LiveRun(run, made, milestones), engines
    finally:
        await coordinator.shutdown()
        tracker.close("FINISHED")
        run.pages.close()


def _ref(config: TrainConfig) -> RunRef:
    """Address of a run that this process alone can find."""
    return RunRef(
        run_dir=config.run_dir.absolute(),
        working_dir=Path.cwd(),
        ray_address="",
        ray_namespace="",
        first_version=0,
    )


def _inputs(config: TrainConfig, num_steps: int) -> Inputs:
    """The same prompts in every step, an epoch each."""
    rng = np.random.default_rng(0)
    prompts = {
        f"{i:032x}": Prompt(
            f"{i:032x}", tuple(rng.integers(0, 30_000, PROMPT_TOKENS).tolist()), "hollow", ""
        )
        for i in range(config.prompts_per_step)
    }
    loader = PromptLoader(
        list(prompts),
        prompts_per_step=config.prompts_per_step,
        num_epochs=num_steps,
        shuffle=True,
        seed=0,
    )
    return Inputs({}, prompts, loader, HollowTokenizer())
