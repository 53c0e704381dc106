"""Traces of a training step for ui.perfetto.dev, by torch's profiler."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from refrain.schemas.trainer import TraceConfig


@contextmanager
def traced(config: TraceConfig | None, step: int, rank: int) -> Generator[None]:
    """Write a Chrome trace of this block to `trainer-RANK.json.gz`, if this step is to be traced.

    The profiler only watches, so the update is the same bit for bit.
    """
    if config is None or config.step != step:
        yield
        return
    config.directory.mkdir(parents=True, exist_ok=True)
    with profile(activities=_activities()) as profiler:
        yield
    profiler.export_chrome_trace(str(config.directory / f"trainer-{rank}.json.gz"))


def _activities() -> list[ProfilerActivity]:
    return [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
