"""Engines that measure at the same time, as Ray actors; every call is bounded."""

import asyncio
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import ray
import ray.exceptions

from engines.bounded import wait_for
from schemas.latency import ProfilePoint
from schemas.profile import MachineFacts, Measurement

STOP_TIMEOUT_S = 30.0


class Profilers:
    """Engines of one kind. A failure of one is a RuntimeError with its name."""

    def __init__(
        self,
        engine: type,
        arguments: Iterable[tuple],
        *,
        num_gpus_each: int,
        start_timeout_s: float,
        point_timeout_s: float,
    ) -> None:
        """Engines, not started yet. `engine`: `ProfilingEngine` or `ProfilingDrafter`; `arguments`:
        of each."""
        self._start_timeout_s = start_timeout_s
        self._point_timeout_s = point_timeout_s
        actor = ray.remote(engine).options(
            num_cpus=0, num_gpus=num_gpus_each, max_restarts=0, max_concurrency=4
        )
        self._actors: list[Any] = [actor.remote(*of_one) for of_one in arguments]

    @property
    def num_engines(self) -> int:
        return len(self._actors)

    async def start(self) -> MachineFacts:
        await self._all("start", timeout_s=self._start_timeout_s)
        (facts, *others) = await self._all("facts", timeout_s=self._point_timeout_s)
        for other in others:
            if other != facts:
                raise ValueError(f"the engines are not alike, {facts} and {other}: profile each")
        return facts

    async def measure(
        self, measurement: Measurement, num_steps: int, seed: str
    ) -> list[ProfilePoint]:
        """The mean over the engines."""
        measured: list[Sequence[ProfilePoint]] = await self._all(
            "measure", measurement, num_steps, seed, timeout_s=self._point_timeout_s
        )
        return [
            points[0].model_copy(update={"seconds": fmean(point.seconds for point in points)})
            for points in zip(*measured, strict=True)
        ]

    async def shutdown(self) -> None:
        try:
            await self._all("shutdown", timeout_s=STOP_TIMEOUT_S)
        except RuntimeError:
            # An engine that is gone already is what was asked for.
            pass
        finally:
            for actor in self._actors:
                ray.kill(actor)

    async def _all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        calls = [getattr(actor, method).remote(*args) for actor in self._actors]
        results = await asyncio.gather(
            *(wait_for(call, timeout_s) for call in calls), return_exceptions=True
        )
        for index, result in enumerate(results):
            if isinstance(result, BaseException):
                cause = getattr(result, "cause", None) or result
                if isinstance(result, TimeoutError):
                    cause = f"no answer in {timeout_s:.0f} s"
                where = f"profiling engine {index}, {method} of {args[0]}" if args else method
                raise RuntimeError(f"{where}: {cause or type(result).__name__}") from result
        return list(results)
