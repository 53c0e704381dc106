"""Profiles of fictitious machines."""

import itertools
from collections.abc import Sequence

import numpy as np

from refrain.engines.latency.forecast import Unfinished, fields_of, forecast
from refrain.engines.latency.interface import Latency
from refrain.schemas.latency import PointKind, Profile, ProfilePoint

BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256)
LENGTHS = (8, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
WINDOWS = (1, 2, 4, 8)
MAX_ACTIVE_TOKENS = 2**19


class AffineMachine:
    """A machine whose times have exactly the form of the fitted model."""

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        return 2e-3 + (8e-3 + 2e-5 * batch + 3e-8 * context_tokens) / tp_degree

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        return batch * rms_tokens**1.5 * 1e-6 / tp_degree

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        extra = window * (1e-4 + 3e-5 * batch) / tp_degree
        return self.decode_s(tp_degree, batch, context_tokens) + extra

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        per_token = {"small": 1e-3 + 1e-6 * batch, "lookup": 1e-6 * batch}[drafter]
        return window * per_token


def measure(
    machine: Latency, tp_degrees=(1, 2), drafters=("small", "lookup"), noise: float = 0.0, seed=0
) -> Profile:
    """Return the profile of this machine. `noise`: standard deviation of the log of the times."""
    random = np.random.default_rng(seed)

    def point(kind: PointKind, seconds: float, **fields) -> ProfilePoint:
        factor = float(np.exp(noise * random.standard_normal()))
        return ProfilePoint(kind=kind, seconds=seconds * factor, num_repeats=60, **fields)

    points = []
    for tp, batch, length in itertools.product(tp_degrees, BATCHES, LENGTHS):
        context = batch * length
        if context > MAX_ACTIVE_TOKENS:
            continue
        at = {"tp_degree": tp, "batch": batch}
        decode_s = machine.decode_s(tp, batch, context)
        points.append(point(PointKind.DECODE, decode_s, context_tokens=context, **at))
        prefill_s = machine.prefill_s(tp, batch, length)
        points.append(point(PointKind.PREFILL, prefill_s, rms_tokens=length, **at))
        for window in WINDOWS if length == 1024 else ():
            verify_s = machine.verify_s(tp, batch, context, window)
            more = {"context_tokens": context, "window": window}
            points.append(point(PointKind.VERIFY, verify_s, **more, **at))
    for drafter, batch, window in itertools.product(drafters, BATCHES, WINDOWS):
        seconds = machine.draft_s(drafter, batch, window)
        more = {"drafter": drafter, "batch": batch, "window": window}
        points.append(point(PointKind.DRAFT, seconds, **more))
    return profile_of(points)


def profile_of(points) -> Profile:
    return Profile(
        model_name="toy",
        model_hash="0" * 8,
        hardware="made up",
        dtype="float32",
        max_active_tokens=MAX_ACTIVE_TOKENS,
        points=tuple(points),
        created_s=0.0,
        versions={"refrain": "0"},
    )


def finish_s(
    latency: Latency, tp_degree: int, requests: Sequence[Unfinished], *, max_num_seqs: int = 256
) -> float:
    """Return the seconds until one engine has finished all these requests; 0.0 without any."""
    if not requests:
        return 0.0
    return forecast(latency, tp_degree, fields_of(requests), max_num_seqs=max_num_seqs).finish_s
