"""Engines on vLLM's V2 runner without a GPU: Triton's interpreter runs its kernels.

Start Python with `interpreted_env`; the actors of the engines inherit it.
"""

import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.schemas.drafting import DraftingConfig, SpecActorConfig
from tests.inference.interpreted.interpreted_triton.asynchronous import ASYNCHRONOUS
from tests.inference.pace import PacedEngine
from tests.inference.paced_worker import PacedWorker
from tests.inference.real import CONFIG

MAX_DRAFT = 6
OFF = {"drafting": DraftingConfig(enabled=False), "specactor": SpecActorConfig()}


def drafting_from(history_dir: Path) -> dict[str, Any]:
    """Return the changes of a configuration that drafts whenever the history has a draft."""
    drafting = DraftingConfig(enabled=True, gate=False, max_draft=MAX_DRAFT)
    return {"drafting": drafting, "specactor": SpecActorConfig(), "history_dir": history_dir}


class WaitingEngine(PacedEngine):
    """Schedules a step when the one before has ended."""

    async def call_ranks(self, method: str, *args: Any) -> list[Any]:
        return await self._llm.collective_rpc(method, args=args)

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        extension = "tests.inference.v2_engines.RecordingWorker"
        return super()._engine_args(on_cpu) | {"worker_extension_cls": extension}


class AsynchronousEngine(WaitingEngine):
    """Schedules a step while the one before runs, as on a GPU."""

    def __init__(self, *args: Any) -> None:
        os.environ[ASYNCHRONOUS] = "1"
        super().__init__(*args)


class RecordingWorker(PacedWorker):
    """Worker that records the drafts which its rank verifies."""

    def record_drafts(self, delay_s: float) -> None:
        """Delay each step by up to `delay_s` on the last rank, and record from now on."""
        runner = self.model_runner
        self._recorded: list[str] = []
        update, execute = runner.update_requests, type(runner).execute_model
        is_last = self.rank == runner.parallel_config.tensor_parallel_size - 1

        def update_and_record(step: Any) -> None:
            update(step)
            states, ids = runner.req_states, sorted(step.scheduled_spec_decode_tokens)
            if ids:
                slots = [states.req_id_to_index[id] for id in ids]
                drafts = states.draft_tokens[slots].cpu().numpy()
                self._recorded.append(hashlib.sha256(drafts.tobytes()).hexdigest())

        def delay_and_execute(*args: Any, **kwargs: Any) -> Any:
            if is_last:
                time.sleep(random.uniform(0, delay_s))
            return execute(runner, *args, **kwargs)

        runner.update_requests, runner.execute_model = update_and_record, delay_and_execute

    def is_asynchronous(self) -> bool:
        """Return whether a step is scheduled while the one before runs."""
        return self.model_runner.vllm_config.scheduler_config.async_scheduling

    def has_kv(self) -> bool:
        """Return whether any key or value is not zero."""
        return any(cache.any().item() for cache in self.model_runner.kv_caches)

    def recorded_drafts(self) -> list[str]:
        """Return a checksum of the drafts of each step that had some."""
        return self._recorded


def v2_engine(
    index: int, engine_class: type[PacedEngine], tp_degree: int = 1, **changes: Any
) -> RayEngine:
    return _engine(index, engine_class, "v2", tp_degree, changes)


def v1_engine(index: int, **changes: Any) -> RayEngine:
    return _engine(index, PacedEngine, "v1", 1, changes)


def _engine(
    index: int,
    engine_class: type[PacedEngine],
    model_runner: str,
    tp_degree: int,
    changes: dict[str, Any],
) -> RayEngine:
    config = CONFIG.engine
    fields = {"tp_degree": tp_degree, "model_runner": model_runner}
    rollout = config.rollout.model_copy(update=fields)
    moves = {"rollout": rollout, "pooled": True}
    return RayEngine(
        index, config.model_copy(update=moves | changes), num_gpus=0, engine_class=engine_class
    )
