"""Profiling engines that measure at the same time, as Ray actors. Every call has a time limit."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from refrain.engines.actors import ActorError, RemoteActor
from refrain.engines.bounded import gather_all
from refrain.schemas.latency import ProfilePoint
from refrain.schemas.profile import MachineFacts, Measurement


class Profilers:
    """Profiling engines of one kind. If one fails, methods raise RuntimeError with its name."""

    def __init__(
        self,
        engine: type,
        arguments: Iterable[tuple],
        *,
        num_gpus_each: int,
        start_timeout_s: float,
        point_timeout_s: float,
    ) -> None:
        """Create the actors; `start` starts vLLM in them.

        Args:
            engine: `ProfilingEngine` or `ProfilingDrafter`.
            arguments: constructor arguments of each engine.
            num_gpus_each: GPUs of each engine.
            start_timeout_s: longest time for the start.
            point_timeout_s: longest time for any other call.
        """
        self._start_timeout_s = start_timeout_s
        self._point_timeout_s = point_timeout_s
        self._actors = [
            RemoteActor(
                f"profiling engine {i}", engine, *own, num_gpus=num_gpus_each, max_concurrency=4
            )
            for i, own in enumerate(arguments)
        ]

    @property
    def num_engines(self) -> int:
        return len(self._actors)

    async def start(self) -> MachineFacts:
        await self._all("start", timeout_s=self._start_timeout_s)
        (facts, *others) = await self._all("facts", timeout_s=self._point_timeout_s)
        for other in others:
            if other != facts:
                raise ValueError(f"the engines differ: {facts} and {other}. Profile each alone")
        return facts

    async def measure(
        self, measurement: Measurement, num_steps: int, seed: str
    ) -> list[ProfilePoint]:
        """Return the points of a measurement, with the mean seconds of all engines."""
        measured: list[Sequence[ProfilePoint]] = await self._all(
            "measure", measurement, num_steps, seed, timeout_s=self._point_timeout_s
        )
        return [
            points[0].model_copy(update={"seconds": fmean(point.seconds for point in points)})
            for points in zip(*measured, strict=True)
        ]

    async def shutdown(self) -> None:
        await gather_all(actor.stop() for actor in self._actors)

    async def _all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        try:
            return await gather_all(
                actor.call(method, *args, timeout_s=timeout_s) for actor in self._actors
            )
        except ActorError as error:
            raise RuntimeError(f"{error} ({args[0]})" if args else str(error)) from error
