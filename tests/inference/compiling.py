"""Start an engine that compiles its model, as engines on GPUs do.

`python -m tests.inference.compiling INDEX` generates a few tokens and prints the directories that
the engine used, as JSON.
"""

import asyncio
import json
import os
import sys
from typing import Any

from refrain.engines.inference.engine.checkpoint_engine import CheckpointEngine
from refrain.engines.inference.engine.process import generate
from refrain.engines.inference.engine.worker import WorkerExtension
from refrain.schemas.config import TrainConfig
from tests.conftest import DEMO

PLACES = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")


class PlacesWorker(WorkerExtension):
    def places(self) -> dict[str, str]:
        """Return the directories of this process. Call it after the model is compiled."""
        from vllm import envs

        found = {name: os.environ.get(name, "") for name in PLACES}
        return found | {"VLLM_CACHE_ROOT": envs.VLLM_CACHE_ROOT}


class CompilingEngine(CheckpointEngine):
    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        extension = f"{PlacesWorker.__module__}.PlacesWorker"
        changes = {"enforce_eager": False, "worker_extension_cls": extension}
        return super()._engine_args(on_cpu) | changes


async def run(index: int) -> dict[str, str]:
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(DEMO / "model"), "dtype": "float32"},
            "data": {"train": ["unused"], "max_prompt_tokens": 32, "max_response_tokens": 32},
            "rollout": {"num_engines": 2, "max_num_seqs": 4},
        }
    )
    engine = CompilingEngine(index, config.engine)
    await engine.start()
    await generate(engine._llm, "one", [5, 6, 7], max_tokens=4)
    (found,) = await engine._llm.collective_rpc("places")
    await engine.shutdown()
    return found


if __name__ == "__main__":
    # The worker imports its extension from this module by name, not from `__main__`.
    from tests.inference import compiling

    print(json.dumps(asyncio.run(compiling.run(int(sys.argv[1])))))
