"""The functions of refrain between a stage's `roll_out` and vLLM, in a rollout of one request.

The path (see `call_path`) begins at `Coordinator.roll_out` in the driver. It goes on in the actor
of a real engine, and ends where refrain first hands the request to vLLM.
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from refrain.benchmarks.call_path import CallTracer, joined
from refrain.benchmarks.stand_ins import MODEL
from refrain.engines.inference.engine.checkpoint_engine import CheckpointEngine
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.rollout.coordinator import Coordinator
from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import FinishedRollout, RequestId, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.run.ray_cluster import ray_cluster

ROOT = Path(__file__).parents[1]
FOLDERS = ("engines", "tasks", "flows", "schemas")
STAGE_S = 60.0
"""Longest time for the rollout."""
_REQUEST = RolloutRequest(
    id=RequestId(Split.TRAIN, 1, "0" * 32, 0),
    prompt_token_ids=(5, 6, 7),
    sample_key=1,
    max_response_tokens=4,
)


class TracedEngine(CheckpointEngine):
    """An engine that keeps the path to vLLM's first call with a request."""

    async def start(self) -> None:
        await super().start()
        self._path: list[str] = []
        tracer, llm = CallTracer(ROOT, FOLDERS), self._llm
        self._following = ExitStack()
        self._following.enter_context(tracer.following())
        # Both public methods of vLLM, and the one that refrain calls to submit a batch.
        processor = llm.output_processor
        for owner, name in ((llm, "add_request"), (llm, "generate"), (processor, "add_request")):
            setattr(owner, name, self._noting(tracer, getattr(owner, name)))

    def _noting(self, tracer: CallTracer, call: Callable) -> Callable:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._path = self._path or tracer.path()
            return call(*args, **kwargs)

        return noted

    def path_to_vllm(self) -> list[str]:
        return self._path


def roll_out_path(model: Path = MODEL) -> list[str]:
    """Return the path as `file:function` each. Starts Ray and an engine, which takes a minute."""
    config = TrainConfig.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "data": {"train": ["none"], "max_prompt_tokens": 64, "max_response_tokens": 64},
            "rollout": {"num_engines": 1, "max_num_seqs": 4, "kv_cache_bytes": 2**26},
            "drafting": {"enabled": False},
        }
    )
    with ray_cluster("bench"):
        return asyncio.run(_trace(config))


async def _trace(config: TrainConfig) -> list[str]:
    async def keep(_: Sequence[FinishedRollout]) -> None:
        """Let the rollout go."""

    tracer = CallTracer(ROOT, FOLDERS)
    with tracer.following(), _handing_over(tracer) as paths:
        engine = RayEngine(0, config.engine, num_gpus=0, engine_class=TracedEngine)
        coordinator = Coordinator([engine])
        await coordinator.start()
        try:
            stage = coordinator.roll_out([(0, _REQUEST)], keep, weights=PolicyWeights(0, None, ()))
            async with asyncio.timeout(STAGE_S):
                await stage
                in_actor = await engine.actor.path_to_vllm.remote()
        finally:
            await coordinator.shutdown()
    (in_driver,) = paths
    first = f":{Coordinator.roll_out.__qualname__}"
    return joined(dropwhile(lambda function: not function.endswith(first), in_driver), in_actor)


@contextmanager
def _handing_over(tracer: CallTracer) -> Generator[list[list[str]]]:
    """Yield the paths to Ray calls that carry a request, as they are made."""
    from ray.actor import ActorMethod

    made, paths = ActorMethod._remote, []

    def noted(method: ActorMethod, args: Any = (), *others: Any, **options: Any) -> Any:
        if any(_REQUEST in arg for arg in args or () if isinstance(arg, list)):
            paths.append(tracer.path())
        return made(method, args, *others, **options)

    with patch.object(ActorMethod, "_remote", noted):
        yield paths
