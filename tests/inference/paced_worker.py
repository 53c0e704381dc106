"""The part of `PacedEngine` in a vLLM worker process."""

import gc
import time
from collections import Counter
from typing import Any

from refrain.engines.inference.engine.decode_steps import DecodeSteps
from refrain.engines.inference.engine.worker import WorkerExtension


class PacedWorker(WorkerExtension):
    def set_pace(self, step_s: float) -> None:
        """Wait `step_s` before each step."""
        runner = self.model_runner
        execute = type(runner).execute_model

        def wait_and_execute(*args: Any, **kwargs: Any) -> Any:
            time.sleep(step_s)
            return execute(runner, *args, **kwargs)

        runner.execute_model = wait_and_execute

    def set_draft_noise(self, is_own: bool) -> None:
        """Draft from the head with a sample's own noise, or with that of other positions."""
        sampler, shift = self.model_runner.sampler, 0 if is_own else 10**6

        def foresee(logits: Any, columns: Any, requests: Any, positions: Any) -> Any:
            return type(sampler).foresee(sampler, logits, columns, requests, positions + shift)

        sampler.foresee = foresee

    def count_steps(self) -> None:
        """Count from now on how much of the scheduling vLLM does. It runs in this process."""
        self._counts: Counter[str] = Counter()
        # The scheduler is frozen with all objects of the start.
        gc.unfreeze()
        (scheduler,) = (one for one in gc.get_objects() if isinstance(one, DecodeSteps))
        gc.freeze()
        decode, append = scheduler._decode_step, scheduler._append_tokens

        def counted_step() -> Any:
            step = decode()
            self._counts["steps of vLLM" if step is None else "steps"] += 1
            return step

        def counted_append(step: Any, *args: Any) -> Any:
            others = append(step, *args)
            self._counts["rows of vLLM"] += len(others)
            self._counts["rows"] += len(step.num_scheduled_tokens) - len(others)
            return others

        scheduler._decode_step, scheduler._append_tokens = counted_step, counted_append

    def take_step_counts(self) -> dict[str, int]:
        return dict(self._counts)
