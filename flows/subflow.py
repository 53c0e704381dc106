"""Retries of flows (for example with Prefect's Retry button), and of the subflows they call."""

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

from refrain.tasks.run.run_dir import CONFIG_FILE

T = TypeVar("T")
_TRIED_AGAIN: ContextVar[bool] = ContextVar("tried_again", default=False)


def is_retried(run_dir: Path) -> bool:
    """Return whether the current flow is a retry and its earlier try has begun the run there."""
    return (this_flow_run.run_count or 1) > 1 and (run_dir / CONFIG_FILE).exists()


@contextmanager
def tried_again(is_again: bool) -> Generator[None]:
    """Let the block's subflow calls continue the flow runs of an earlier try, as after Prefect's
    Retry. `is_again`: False changes nothing."""
    token = _TRIED_AGAIN.set(is_again)
    try:
        yield
    finally:
        _TRIED_AGAIN.reset(token)


async def call_numbered(
    subflow: Callable[..., Coroutine[Any, Any, T]], number: int, *args: Any, **kwargs: Any
) -> T:
    """Call a subflow under an explicit number, for example its step.

    Prefect counts the calls of a subflow. In a retry, it maps the n-th call to the n-th call of the
    first try. When a retry begins with step 3, its calls would continue the runs of steps 1 and 2,
    and Prefect would skip those that are completed. The number maps each call to its own run,
    whatever state that run ended in.
    """
    assert isinstance(subflow, Flow)
    outer = FlowRunContext.get()
    assert outer is not None, "call a subflow from a flow"
    assert outer.flow_run is not None
    # Prefect makes the same task for the call, and counts its calls from the keys below.
    stand_in = Task(name=subflow.name, fn=subflow.fn)
    if outer.flow_run.run_count > 1 or _TRIED_AGAIN.get():
        async with get_client() as client:
            await _reopen(client, outer, stand_in, number)
    keys = {**outer.task_run_dynamic_keys, stand_in.task_key: number - 1}
    with outer.model_copy(update={"task_run_dynamic_keys": keys}):
        return await subflow(*args, **kwargs)


def this_call() -> State[bool]:
    """Return the call of the current subflow. Later calls pass it to `wait_for`, which draws an
    edge in Prefect's graph. Nobody waits for the end of this call."""
    called = FlowRunContext.get()
    assert called is not None
    assert called.flow_run is not None
    details = StateDetails(task_run_id=called.flow_run.parent_task_run_id)
    # Prefect reads the state's data, so give it some.
    return Completed(state_details=details, data=True)


async def _reopen(
    client: PrefectClient, outer: FlowRunContext, stand_in: Task[..., Any], number: int
) -> None:
    """Set the subflow run of an earlier try, if any, to pending, so that it runs again."""
    assert outer.flow_run is not None
    again = Pending(message="The parent flow is retried.")
    named = TaskRunFilter.model_validate({"name": {"any_": [f"{stand_in.name}-{number}"]}})
    of_outer = FlowRunFilter.model_validate({"id": {"any_": [outer.flow_run.id]}})
    for call in await client.read_task_runs(flow_run_filter=of_outer, task_run_filter=named):
        called = FlowRunFilter.model_validate({"parent_task_run_id": {"any_": [call.id]}})
        for run in await client.read_flow_runs(flow_run_filter=called):
            await client.set_flow_run_state(run.id, again, force=True)
        await client.set_task_run_state(call.id, again, force=True)
