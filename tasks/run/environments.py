"""A run's environments: what their file declares, and the actors that answer turns."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from refrain.engines.actors import RemoteActor
from refrain.engines.bounded import gather_all
from refrain.engines.data.messages import PromptSettings
from refrain.engines.environment.actor import EnvironmentActor
from refrain.engines.environment.client import EnvironmentClient, name_of
from refrain.engines.environment.pool import EnvironmentPool
from refrain.engines.environment.process import EnvironmentSetup
from refrain.engines.environment.rendering import TurnRenderer, check
from refrain.engines.gpus.placement import GpuPlacement
from refrain.engines.inference.tool_parsers import check_parser, open_parser
from refrain.engines.store.actor import find_store
from refrain.schemas.config import TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.environment import EnvironmentConfig, EnvironmentTask
from refrain.schemas.keys import group_seed
from refrain.schemas.rollout import FinishedRollout, FinishReason, RequestId

START_TIMEOUT_S = 600.0
"""Time limit for starting the actor, and for importing the user's file in it."""
MAX_CONCURRENCY = 4096
"""Most conversations that wait for the actor at the same time."""


def read_environment(
    config: TrainConfig, tokenizer: Any, settings: PromptSettings
) -> tuple[EnvironmentSetup | None, PromptSettings, tuple[str, ...]]:
    """Return what the environment's file declares, the prompts' settings with its tools, and
    warnings. Raise ValueError when the file or the model's chat template cannot be used."""
    if config.environment is None:
        return None, settings, ()
    setup = describe(config.environment, config.data.surroundings)
    renderer = TurnRenderer(tokenizer, settings.template_arguments, setup.tools, settings.date)
    check(renderer, "user" if setup.has_class else "tool")
    _try_parser(config.environment.parser, tokenizer, setup.tools)
    if not setup.tools:
        return setup, settings, ()
    tools = {"tools": list(setup.tools)}
    with_tools = replace(settings, template_arguments={**settings.template_arguments, **tools})
    if renderer.shows_tools():
        return setup, with_tools, ()
    warning = (
        "the model's chat template does not show tools to the model: describe them in "
        "data.system_prompt or in the prompts"
    )
    return setup, with_tools, (warning,)


def describe(config: EnvironmentConfig, surroundings: Mapping[str, str] | None) -> EnvironmentSetup:
    """Import the user's file in a process of its own, and return what it declares. Raise ValueError
    that names the file."""

    async def ask() -> EnvironmentSetup:
        pool = EnvironmentPool(config, surroundings)
        try:
            return await pool.start()
        finally:
            await pool.close()

    # The caller may be in an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(ask())).result()


def _try_parser(name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if vLLM has no such parser, or it cannot be used with the tokenizer."""
    if name == "hermes":
        return
    # vLLM takes several seconds and 700 MB, so not in this process.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(check_parser, name, tokenizer, tools).result(START_TIMEOUT_S)


def task_of(config: TrainConfig, id: RequestId, prompt: Prompt) -> EnvironmentTask | None:
    """Return what the environment of a sample starts with. None without an environment."""
    if config.environment is None:
        return None
    return EnvironmentTask(
        prompt_key=prompt.key,
        data_source=prompt.data_source,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        seed=group_seed(config.seed, id.step, id.split, id.prompt_key),
        messages=prompt.messages,
    )


async def start_environments(
    config: TrainConfig,
    stack: AsyncExitStack,
    placement: GpuPlacement,
    store: str | None = None,
) -> None:
    """Start an actor that answers turns on each node of the run, if it has environments. They end
    with the stack. Raise `ActorError` that names the node whose actor cannot start.

    `store`: name of the store's actor, which keeps the journal. None: without a journal.
    """
    if config.environment is None:
        return
    nodes = run_nodes(placement)
    actors = [
        RemoteActor(
            f"the environments on {address}" if len(nodes) > 1 else "the environments",
            EnvironmentActor,
            config,
            open_parser,
            store and partial(find_store, store),
            share,
            len(nodes),
            node_id=node,
            soft=True,
            max_concurrency=MAX_CONCURRENCY,
            max_restarts=3,
            max_task_retries=3,
            found_by=name_of(share, len(nodes)),
        )
        for share, (node, address) in enumerate(nodes.items())
    ]

    async def stop() -> None:
        await gather_all(actor.stop() for actor in actors)

    stack.push_async_callback(stop)
    await gather_all(actor.call("start", timeout_s=START_TIMEOUT_S) for actor in actors)


def run_nodes(placement: GpuPlacement) -> dict[str, str]:
    """Return the address of each Ray node that needs environments, by id: this one, and those of
    the run's GPUs. Without GPUs, return all nodes, because engines may start on each."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    alive = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]}
    with_gpus = {node for of_part in placement.nodes.values() for node in of_part}
    own = {here, *with_gpus} if placement.num_gpus else alive.keys()
    return {node: alive[node] for node in sorted(own, key=lambda node: (node != here, node))}


async def refuse_failed(config: TrainConfig, rollouts: Sequence[FinishedRollout]) -> None:
    """Raise ValueError if a conversation failed and `environment.on_error` is `stop`."""
    environment = config.environment
    failed = [one.id for one in rollouts if one.finish_reason is FinishReason.FAILED]
    if environment is None or environment.on_error != "stop" or not failed:
        return
    reasons = await EnvironmentClient(environment).failures()
    reason = reasons.get(str(failed[0].origin), "the reason is lost")
    raise ValueError(
        f"{len(failed)} conversations failed, the first is {failed[0]}: {reason}\nRepair it and go "
        "on with --resume, or set environment.on_error to zero or leave_out"
    )
