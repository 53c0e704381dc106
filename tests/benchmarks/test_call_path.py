"""The path to a call has every function that led to it, across tasks and queues, and no other."""

import asyncio
from collections.abc import Callable

import pytest

from refrain.benchmarks.call_path import CallTracer
from tests.conftest import REPOSITORY

HERE = "tests/benchmarks/test_call_path.py"


class Chain:
    """A stage of one request: a task gives an order, whose report makes another task submit."""

    def __init__(self, tracer: CallTracer) -> None:
        self.tracer = tracer
        self.inbox: asyncio.Queue[str] = asyncio.Queue()
        self.path: list[str] = []

    async def roll_out(self) -> None:
        serving = asyncio.create_task(self.serve())
        self.inbox.put_nowait("queued")
        await serving

    async def serve(self) -> None:
        while not self.path:
            match await self.inbox.get():
                case "queued":
                    await self.order()
                case "synced":
                    self.submit()

    async def order(self) -> None:
        self.returns_before()
        self.order_task = asyncio.create_task(self.carry_out())

    def returns_before(self) -> None:
        """Be called, and lead nowhere."""

    async def carry_out(self) -> None:
        await self.inbox.put("synced")

    def submit(self) -> None:
        self.path = [path for _ in range(1) for path in self.tracer.path()]


class LongerChain(Chain):
    """The same with a wrapper around the order."""

    async def order(self) -> None:
        await super().order()


class ShorterChain(Chain):
    """The same without a function of its own that carries out the order."""

    async def order(self) -> None:
        self.order_task = asyncio.create_task(self.inbox.put("synced"))


TASKS = ["Chain.roll_out", "Chain.serve"]


@pytest.mark.parametrize(
    ("chain_class", "functions"),
    [
        (Chain, [*TASKS, "Chain.order", "Chain.carry_out", "Chain.submit"]),
        (
            LongerChain,
            [*TASKS, "LongerChain.order", "Chain.order", "Chain.carry_out", "Chain.submit"],
        ),
        (ShorterChain, [*TASKS, "ShorterChain.order", "Chain.submit"]),
    ],
)
async def test_each_function_on_the_path_counts_once(
    chain_class: Callable[[CallTracer], Chain], functions: list[str]
) -> None:
    tracer = CallTracer(REPOSITORY, ["tests/benchmarks"])
    with tracer.following():
        chain = chain_class(tracer)
        await chain.roll_out()
    here, *path = chain.path
    assert here == f"{HERE}:test_each_function_on_the_path_counts_once"
    assert path == [f"{HERE}:{function}" for function in functions]


async def test_other_folders_do_not_count_and_nothing_is_followed_afterwards() -> None:
    tracer = CallTracer(REPOSITORY / "refrain", ["engines"])
    queue_class = asyncio.Queue
    with tracer.following():
        chain = Chain(tracer)
        chain.submit()
    assert chain.path == []
    assert asyncio.Queue is queue_class
    assert asyncio.get_running_loop().get_task_factory() is None
