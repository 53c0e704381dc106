"""The part of `PacedEngine` in a vLLM worker process."""

import time
from typing import Any

from engines.inference.engine.worker import WorkerExtension


class PacedWorker(WorkerExtension):
    def set_pace(self, step_s: float) -> None:
        """Wait `step_s` before each step."""
        runner = self.model_runner
        execute = type(runner).execute_model

        def wait_and_execute(*args: Any, **kwargs: Any) -> Any:
            time.sleep(step_s)
            return execute(runner, *args, **kwargs)

        runner.execute_model = wait_and_execute
