"""Answer conversations on two nodes, kill one of them, and print what happened as JSON.

The tool returns another number at each call. So an answer that is the same twice comes from one
call. Engines on both nodes ask for the same turns at the same time, as in a race, and each turn is
asked for once more by the other engine, as after a move.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from refrain.engines.data.tokenizer import open_tokenizer
from refrain.engines.environment.client import EnvironmentClient, TurnAnswer, answered, name_of
from refrain.engines.gpus.placement import GpuPlacement
from refrain.engines.inference.engine.conversations import NOTHING, with_turn
from refrain.engines.store.actor import start_store
from refrain.flows.config_file import load_config
from refrain.flows.environment import quieten
from refrain.schemas.base import with_absolute_paths
from refrain.schemas.config import TrainConfig
from refrain.schemas.environment import EnvironmentTask
from refrain.schemas.rollout import RequestId, RolloutRequest, Split, VersionSpan
from refrain.tasks.run.environments import start_environments
from tests.conftest import REPOSITORY
from tests.ray_token import make_token, second_node
from tests.tasks.ray_death import kill

TOOL = '''
import secrets
from pathlib import Path

def draw() -> int:
    """A number: another one at each call."""
    with Path(__file__).with_name("calls").open("a") as file:
        file.write("x")
    return secrets.randbelow(10**6)

tools = [draw]
'''
CALL = '<tool_call>{"name": "draw", "arguments": {}}</tool_call>'
NUM_SAMPLES, NUM_TURNS = 16, 2
TASK = EnvironmentTask("a", "mine", None, {}, 7)


class Asker:
    """The part of an engine that asks the environments."""

    def __init__(self, config: Any) -> None:
        self._client = EnvironmentClient(config)

    async def ask(self, request: RolloutRequest) -> TurnAnswer:
        return await self._client.answer(request)


def drawn(request: RolloutRequest, turn: Sequence[int]) -> RolloutRequest:
    """Return the request with one more turn, which waits for its answer."""
    before = request.generated or NOTHING
    num, tokens = before.num_sampled + len(turn), [*before.token_ids, *turn]
    spans = (VersionSpan(0, num),)
    whole = replace(before, token_ids=tokens, inference_logprobs=[-0.5] * num, spans=spans)
    return replace(request, generated=with_turn(whole))


async def observed(asker: Any, request: RolloutRequest) -> tuple[int, ...]:
    answer: TurnAnswer = await asker.ask.remote(request)
    assert (answer.failed, answer.restarts) == (False, False), answer
    assert answer.observed
    return tuple(answer.observed)


@dataclass
class Answers:
    """What engines were answered."""

    num: int = 0
    num_other: int = 0
    """Answers that differ where they must be the same."""

    async def of(self, request: RolloutRequest, askers: Sequence[Any]) -> RolloutRequest:
        """Return the request with its answered turn. Each of these engines asks."""
        first, *others = await asyncio.gather(*(observed(one, request) for one in askers))
        self.num += 1
        self.num_other += any(one != first for one in others)
        assert request.generated
        return replace(request, generated=answered(request.generated, TurnAnswer(first)))

    async def of_all(
        self, requests: Sequence[RolloutRequest], askers: Sequence[Any]
    ) -> list[RolloutRequest]:
        return await asyncio.gather(*(self.of(one, askers) for one in requests))

    def compare(self, ours: Sequence[RolloutRequest], theirs: Sequence[RolloutRequest]) -> None:
        self.num_other += sum(
            list(one.generated.token_ids) != list(other.generated.token_ids)
            for one, other in zip(ours, theirs, strict=True)
        )


def tools_config(directory: Path) -> TrainConfig:
    """Return the config of a run with `TOOL`."""
    tool = directory / "mine.py"
    tool.write_text(TOOL)
    config = load_config(
        REPOSITORY / "infra" / "demo_tools" / "train.yaml",
        (f"environment.path={tool}", "environment.processes=1"),
    )
    return with_absolute_paths(config)


async def engines_beside_actors(config: TrainConfig) -> dict[str, Any]:
    """Return an asking engine on the node of each of two actors, by node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    actors = [ray.get_actor(name_of(share, 2)) for share in range(2)]
    where = [await one.__ray_call__.remote(_node) for one in actors]
    make: Any = ray.remote(Asker)
    return {
        node: make.options(num_cpus=0, scheduling_strategy=On(node, soft=False)).remote(
            config.environment
        )
        for node in where
    }


async def lose_a_node(directory: Path, node: Any) -> dict[str, Any]:
    import ray

    config, answers = tools_config(directory), Answers()
    assert config.environment
    tokenizer = open_tokenizer(config.model.path, trust_remote_code=False, try_first=False)
    turn = [*tokenizer.encode(CALL, add_special_tokens=False), tokenizer.eos_token_id]

    def num_calls() -> int:
        return len((directory / "calls").read_text())

    async with AsyncExitStack() as stack:
        store = start_store(directory / "run.duckdb", "store")
        await start_environments(config, stack, GpuPlacement(), "store")
        engines = await engines_beside_actors(config)
        askers = list(engines.values())
        requests = [
            RolloutRequest(RequestId(Split.TRAIN, 1, "a", n), (1, 2), 0, 10_000, task=TASK)
            for n in range(NUM_SAMPLES)
        ]
        for _ in range(NUM_TURNS):
            waiting = [drawn(request, turn) for request in requests]
            requests = await answers.of_all(waiting, askers)
            answers.compare(requests, await answers.of_all(waiting, askers[1:]))
        shown: dict[str, Any] = {"calls": num_calls(), "nodes": len(engines)}
        client = EnvironmentClient(config.environment)
        shown["written"] = len(await client.written([one.id for one in requests]))
        (survivor,) = (one for of, one in engines.items() if of != node.node_id)
        kill(node, with_all=True)
        killed_s = time.monotonic()
        # The last answered turn again, as the engines of the dead node had it.
        again = await answers.of_all(waiting, [survivor])
        shown["again_s"] = time.monotonic() - killed_s
        answers.compare(requests, again)
        shown["calls_again"] = num_calls()
        await answers.of_all([drawn(one, turn) for one in requests], [survivor])
        shown["calls_after"] = num_calls()
        await client.finished([one.id for one in requests])
        shown["journal_s"] = await client.journal_s()
        ray.kill(store)
    return {"answers": answers.num, "other": answers.num_other, **shown}


def _node(_: Any) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def main(directory: Path) -> None:
    with second_node("nodes", num_cpus=2) as node:
        print(json.dumps(asyncio.run(lose_a_node(directory, node))))


if __name__ == "__main__":
    quieten()
    make_token()
    main(Path(sys.argv[1]))
