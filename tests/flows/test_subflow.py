"""A retried flow shows each of its subflows once. These tests use a real Prefect server."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from refrain.flows.environment import quieten

quieten()

from prefect import flow  # noqa: E402
from prefect.client.orchestration import get_client  # noqa: E402
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter  # noqa: E402
from prefect.flow_engine import run_flow_async  # noqa: E402
from prefect.runtime import flow_run as this_flow_run  # noqa: E402
from prefect.states import Pending  # noqa: E402

from refrain.flows.subflow import call_numbered, is_retried, this_call, tried_again  # noqa: E402
from refrain.tasks.run.advice import run_task  # noqa: E402
from refrain.tasks.run.run_dir import CONFIG_FILE  # noqa: E402

FAILS_IN, GOES_ON_FROM, LAST = 3, 2, 4
"""Step 3 fails at the first try. The second try begins at step 2, although step 2 was completed:
the last checkpoint is older."""


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    # It takes two seconds, which tests without engines would spend too.
    from prefect.testing.utilities import prefect_test_harness

    before = dict(os.environ)
    with prefect_test_harness(server_startup_timeout=120):
        yield
    os.environ.clear()
    os.environ.update(before)


@flow(flow_run_name="part {number}")
async def part(number: int, calls: Any) -> Any:
    """A step. It appends its number to `calls`."""
    calls.append(number)
    if number == FAILS_IN and calls.count(number) == 1:
        raise RuntimeError("as it should")
    return this_call()


def made_by(call: Callable[..., Any]) -> tuple[Any, list[int]]:
    calls: list[int] = []

    @flow
    async def whole() -> None:
        edge = None
        first = 1 if this_flow_run.run_count == 1 else GOES_ON_FROM
        for number in range(first, LAST + 1):
            edge = [await call(part, number, number, calls, wait_for=edge)]

    return whole, calls


async def tried_twice(whole: Any) -> Any:
    """Run the flow until it fails, retry it, and return the id of its run."""
    failed = await whole(return_state=True)
    assert failed.is_failed()
    run_id = failed.state_details.flow_run_id
    async with get_client() as client:
        # Prefect's button Retry does the same.
        await client.set_flow_run_state(run_id, Pending(), force=True)
        again = await client.read_flow_run(run_id)
    await run_flow_async(whole, flow_run=again)
    return run_id


async def parts_of(run_id: Any) -> list[Any]:
    of_run = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [run_id]}})
    async with get_client() as client:
        found = await client.read_flow_runs(flow_run_filter=of_run)
    return sorted(found, key=lambda run: run.name)


async def tasks_of(run_id: Any, number: int) -> list[Any]:
    """Return the tasks of a flow run. Prefect's server writes them down a little later."""
    of_run = FlowRunFilter.model_validate({"id": {"any_": [run_id]}})
    async with get_client() as client, asyncio.timeout(60.0):
        while len(found := await client.read_task_runs(flow_run_filter=of_run)) < number:
            await asyncio.sleep(0.2)
    return found


async def test_each_subflow_is_shown_once_as_it_ended() -> None:
    whole, calls = made_by(call_numbered)
    run_id = await tried_twice(whole)
    assert calls == [1, 2, 3, 2, 3, 4]
    parts = await parts_of(run_id)
    assert [run.name for run in parts] == ["part 1", "part 2", "part 3", "part 4"]
    assert {run.state.name for run in parts} == {"Completed"}
    assert [run.run_count for run in parts] == [1, 2, 2, 1]


async def test_each_subflow_is_shown_once_after_auto_resume() -> None:
    """The flow repeats steps within one run, as after a crash."""
    calls: list[int] = []

    @flow
    async def whole() -> None:
        for first in (1, GOES_ON_FROM):
            with suppress(RuntimeError), tried_again(first > 1):
                for number in range(first, LAST + 1):
                    await call_numbered(part, number, number, calls)

    state = await whole(return_state=True)
    assert state.is_completed()
    assert calls == [1, 2, 3, 2, 3, 4]
    parts = await parts_of(state.state_details.flow_run_id)
    assert [run.name for run in parts] == ["part 1", "part 2", "part 3", "part 4"]
    assert {run.state.name for run in parts} == {"Completed"}


async def test_the_graph_shows_what_builds_on_what() -> None:
    whole, _ = made_by(call_numbered)
    run_id = await tried_twice(whole)
    of_run = TaskRunFilter.model_validate({"flow_run_id": {"any_": [run_id]}})
    async with get_client() as client:
        calls = {c.name: c for c in await client.read_task_runs(task_run_filter=of_run)}
    inputs = {
        name: {given.id for given in call.task_inputs.get("wait_for", ())}
        for name, call in calls.items()
    }
    assert inputs["part-2"] == {calls["part-1"].id}
    assert inputs["part-4"] == {calls["part-3"].id}


async def test_a_task_is_linked_to_its_arguments_but_not_to_their_contents() -> None:
    @run_task
    async def make(ref: Any) -> Any:
        return {"made for": ref}

    @run_task
    async def use(_: Any, given: Any, *, named: Any, contents: Any) -> Any:
        return given, named, contents

    @flow
    async def whole() -> Any:
        run: Any = "run"
        first, second, third = [await make(run) for _ in range(3)]
        used = await use(run, first, named=second, contents=[third])
        assert used == (first, second, [third])

    state = await whole(return_state=True)
    assert state.is_completed(), state.message
    tasks = await tasks_of(state.state_details.flow_run_id, 4)
    (used,) = (task for task in tasks if task.name.startswith("use"))
    made = {task.id for task in tasks if task.name.startswith("make")}
    links = {name: {one.id for one in ids} for name, ids in used.task_inputs.items()}
    assert len(links["given"]) == len(links["named"]) == 1
    assert links["given"] | links["named"] < made
    assert links["contents"] == set()


async def test_without_their_numbers_they_are_mixed_up() -> None:
    """Negative control: Prefect mixes up subflows that have no numbers."""

    async def plain(subflow: Any, number: int, *args: Any, wait_for: Any) -> Any:
        del number, wait_for
        return await subflow(*args)

    whole, calls = made_by(plain)
    run_id = await tried_twice(whole)
    names = [run.name for run in await parts_of(run_id)]
    assert names != ["part 1", "part 2", "part 3", "part 4"] or calls != [1, 2, 3, 2, 3, 4]


async def test_retry_continues_a_begun_subflow(tmp_path: Path) -> None:
    found: list[tuple[bool, bool]] = []

    @flow
    async def whole() -> None:
        found.append((is_retried(tmp_path / "nothing"), is_retried(tmp_path)))
        assert len(found) > 1

    (tmp_path / CONFIG_FILE).touch()
    await tried_twice(whole)
    assert found == [(False, False), (False, True)]
