"""Flows that are tried again, by Prefect's Retry, and those that they call."""

from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from prefect import Flow, Task
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import StateDetails
from prefect.context import FlowRunContext
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Completed, Pending, State

from tasks.run.run_dir import CONFIG_FILE

T = TypeVar("T")
_TRIED_AGAIN: ContextVar[bool] = ContextVar("tried_again", default=False)


def is_retried(run_dir: Path) -> bool:
    """Whether the flow that is running is tried again, and has something to go on with there."""
    return (this_flow_run.run_count or 1) > 1 and (run_dir / CONFIG_FILE).exists()


@contextmanager
def tried_again(is_again: bool) -> Generator[None]:
    """Let subflows that the block calls go on in the runs of an earlier try of the same flow run,
    as they do after Prefect's Retry."""
    token = _TRIED_AGAIN.set(is_again)
    try:
        yield
    finally:
        _TRIED_AGAIN.reset(token)


async def call_numbered(
    subflow: Callable[..., Coroutine[Any, Any, T]], number: int, *args: Any, **kwargs: Any
) -> T:
    """Call a subflow under a number of its own.

    Prefect counts the calls of a subflow, and takes the n-th of a flow that is tried again for the
    n-th of the first try: where the second try begins with step 3, its steps would go on in the
    runs of steps 1 and 2, and what is completed would not be called at all. By their numbers they
    are found again, and go on in a run of their own, however they ended.
    """
    assert isinstance(subflow, Flow)
    outer = FlowRunContext.get()
    assert outer is not None, "a subflow is called by a flow"
    assert outer.flow_run is not None
    # As Prefect makes it for the call, which counts from what is there.
    stand_in = Task(name=subflow.name, fn=subflow.fn)
    if outer.flow_run.run_count > 1 or _TRIED_AGAIN.get():
        async with get_client() as client:
            await _reopen(client, outer, stand_in, number)
    keys = {**outer.task_run_dynamic_keys, stand_in.task_key: number - 1}
    with outer.model_copy(update={"task_run_dynamic_keys": keys}):
        return await subflow(*args, **kwargs)


def this_call() -> State[bool]:
    """The call of the subflow that is running, for `wait_for` of those that build on it: an edge of
    Prefect's graph. Nobody waits for its end."""
    called = FlowRunContext.get()
    assert called is not None
    assert called.flow_run is not None
    details = StateDetails(task_run_id=called.flow_run.parent_task_run_id)
    # Prefect reads what it holds, and misses it where there is nothing.
    return Completed(state_details=details, data=True)


async def _reopen(
    client: PrefectClient, outer: FlowRunContext, stand_in: Task[..., Any], number: int
) -> None:
    """Let the run of an earlier try be run again, if there is one."""
    assert outer.flow_run is not None
    again = Pending(message="The flow that it is part of is tried again.")
    named = TaskRunFilter.model_validate({"name": {"any_": [f"{stand_in.name}-{number}"]}})
    of_outer = FlowRunFilter.model_validate({"id": {"any_": [outer.flow_run.id]}})
    for call in await client.read_task_runs(flow_run_filter=of_outer, task_run_filter=named):
        called = FlowRunFilter.model_validate({"parent_task_run_id": {"any_": [call.id]}})
        for run in await client.read_flow_runs(flow_run_filter=called):
            await client.set_flow_run_state(run.id, again, force=True)
        await client.set_task_run_state(call.id, again, force=True)
