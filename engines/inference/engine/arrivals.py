"""Start all requests of one submission in the same step.

Otherwise vLLM would run small steps of the first requests while the others are still arriving.
"""

from collections import defaultdict
from typing import Any

BATCH = "batch"
"""Key in `SamplingParams.extra_args` of (id, number of requests) of a request's submission."""


class Arrivals:
    """Requests that wait for the rest of their batch."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Any]] = defaultdict(list)
        self._num_arrived: dict[str, int] = defaultdict(int)

    def begin_with(self, request: Any, batch: str, size: int) -> list[Any]:
        """Add a request of a batch with `size` requests.

        Return the whole batch in order of arrival if this request completes it, else nothing.
        """
        self._waiting[batch].append(request)
        self._num_arrived[batch] += 1
        if self._num_arrived[batch] < size:
            return []
        del self._num_arrived[batch]
        return self._waiting.pop(batch)

    def begin_at_once(self) -> list[Any]:
        """Return all waiting requests: they start without the rest of their batches."""
        waiting = [request for requests in self._waiting.values() for request in requests]
        self._waiting.clear()
        return waiting
