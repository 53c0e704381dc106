"""Measure what an engine's thread and GPU do. The worker shares its process and its thread."""

import sys
import threading
import time
from collections import Counter
from typing import Any

import torch

from refrain.engines.inference.engine.worker import WorkerExtension

EVERY_S = 0.002
PARTS = {
    "get_output": "waits",
    "synchronize": "waits",
    "process_input_queue": "idles",
    "_process_input_queue": "idles",
    "schedule": "schedule",
    "update_from_output": "update",
    "update_draft_token_ids": "update",
    "propose": "draft",
    "_update_states": "runner_states",
    "_prepare_inputs": "runner_inputs",
    "_build_attention_metadata": "runner_inputs",
    "_model_forward": "forward",
    "_sample": "sample",
    "_bookkeeping_sync": "runner_books",
}
"""Parts of a step by the function that does them. The innermost function counts."""


class SampledWorker(WorkerExtension):
    def start_sampling(self) -> None:
        self._samples: Counter[tuple[str, ...]] = Counter()
        self._graphs: Counter[str] = Counter()
        """Steps by the kind of CUDA graph."""
        runner = self.model_runner
        on_v2 = self.use_v2_model_runner
        self._graphs_of = runner.cudagraph_manager if on_v2 else runner.cudagraph_dispatcher
        dispatch = self._graphs_of.dispatch

        def counted(*args: Any, **kwargs: Any) -> Any:
            found = dispatch(*args, **kwargs)
            self._graphs[(found.cg_mode if on_v2 else found[0]).name] += 1
            return found

        self._graphs_of.dispatch = counted
        self._sampling = True
        thread = threading.get_ident()
        threading.Thread(target=self._sample_stacks, args=(thread,), daemon=True).start()

    def take_samples(self) -> tuple[dict[str, float], list[str], float]:
        """Return the share of each part, the most frequent stacks, and the share of steps with a
        full CUDA graph."""
        self._sampling = False
        del self._graphs_of.dispatch
        shares: Counter[str] = Counter()
        for stack, num in self._samples.items():
            part = next((PARTS[name] for name in stack if name in PARTS), "other")
            shares[part] += num
        total = shares.total()
        frequent = self._samples.most_common(25)
        return (
            {part: num / total for part, num in shares.items()},
            [f"{num / total:.3f} {' < '.join(stack[:6])}" for stack, num in frequent],
            self._graphs["FULL"] / self._graphs.total(),
        )

    def start_kernels(self) -> None:
        activity = torch.profiler.ProfilerActivity.CUDA
        self._kernels = torch.profiler.profile(activities=[activity])
        self._kernels.start()
        self._started_s = time.perf_counter()

    def take_kernels(self) -> tuple[float, list[tuple[str, int, float]]]:
        """Return the seconds, and of each kernel its name, calls and seconds, longest first."""
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started_s
        self._kernels.stop()
        rows = [
            (row.key, row.count, row.device_time_total / 1e6)
            for row in self._kernels.key_averages()
            if row.device_type == torch.autograd.DeviceType.CUDA
        ]
        return seconds, sorted(rows, key=lambda row: -row[2])

    def _sample_stacks(self, thread: int) -> None:
        while self._sampling:
            frame, names = sys._current_frames().get(thread), []
            while frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            self._samples[tuple(names)] += 1
            time.sleep(EVERY_S)
