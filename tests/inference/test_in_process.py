"""An engine for a loop of one's own returns its rollouts, or the error that ended them."""

from types import SimpleNamespace

import pytest

from refrain.engines.inference.engine.in_process import InProcessEngine
from tests.inference.real import requests
from tests.inference.test_events import UNDRAFTED, finished

REQUESTS = requests([(5, 6, 7)])[:3]


class Instant(InProcessEngine):
    """Finishes requests at once, the last one first. An error ends them all instead."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(0, UNDRAFTED)
        self._llm = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
        self._error = error

    async def submit(self, requests):
        self._finished += [finished(request, [8, 9]) for request in reversed(requests)]
        self._failure = self._error
        self._drained.set()


async def test_rollouts_have_the_order_of_their_requests():
    engine = Instant()
    for _ in range(2):
        rollouts = await engine.generate(REQUESTS)
        assert [rollout.id for rollout in rollouts] == [request.id for request in REQUESTS]


async def test_an_error_of_vllm_is_raised():
    with pytest.raises(RuntimeError, match="out of memory"):
        await Instant(MemoryError("out of memory")).generate(REQUESTS)
