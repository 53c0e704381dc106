"""Requests of one submission begin together: in steps of few requests, the first of them would take
the time of the others."""

from collections import defaultdict
from typing import Any

BATCH = "batch"
"""Name in `SamplingParams.extra_args` of the submission that a request is part of, and how many
requests that has."""


class Arrivals:
    """Requests of batches that are not all there yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Any]] = defaultdict(list)
        self._num_arrived: dict[str, int] = defaultdict(int)

    def begin_with(self, request: Any, batch: str, size: int) -> list[Any]:
        """Requests that begin, the first to come first, now that this one of a batch of so many has
        come."""
        self._waiting[batch].append(request)
        self._num_arrived[batch] += 1
        if self._num_arrived[batch] < size:
            return []
        del self._num_arrived[batch]
        return self._waiting.pop(batch)

    def begin_at_once(self) -> list[Any]:
        """Requests that are here, which do not wait for the others any more."""
        waiting = [request for requests in self._waiting.values() for request in requests]
        self._waiting.clear()
        return waiting
