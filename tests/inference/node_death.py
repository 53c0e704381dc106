"""Run a step on engines of two nodes, kill a node in the middle, and print the result as JSON.

Starts a cluster of its own, and runs the same step three times:

    lap 1    undisturbed
    lap 2    the node dies after its engine has finished a few requests. Either all its processes
             die, or only the raylet: then the engine works on until Ray declares the node dead
    lap 3    requests are assigned as if both engines were alive
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from refrain.flows.environment import quieten
from refrain.schemas.counts import DraftingCounts
from refrain.schemas.rollout import (
    FinishedRollout,
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    VersionSpan,
)
from refrain.schemas.weights import PolicyWeights
from tests.ray_token import make_token, second_node
from tests.rollout.fakes import request, token_at
from tests.tasks.ray_death import kill

LAP_TIMEOUT_S = 120.0
FETCH_TIMEOUT_S = 60.0


class Hashes:
    """Stand-in for vLLM in an engine's actor. Its tokens are hashes."""

    token_s = 0.02

    def __init__(self, index: int, *_: Any) -> None:
        self._index = index
        self._running: dict[RequestId, tuple[RolloutRequest, float]] = {}
        self._finished: list[Rollout] = []
        self._num_acknowledged = 0

    def mark_processes(self, mark: str) -> Any:
        import ray

        from refrain.engines.gpus.cleanup import Marked, given_gpus, mark_children

        mark_children(mark)
        return Marked(mark, ray.get_runtime_context().get_node_id(), given_gpus())

    async def start(self) -> None: ...

    async def shutdown(self) -> None: ...

    async def load_weights(self, weights: PolicyWeights) -> float:
        assert not self._running
        assert weights.policy_version == 0
        return 0.0

    async def take_drafting_counts(self) -> DraftingCounts:
        return DraftingCounts()

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._running |= {r.id: (r, time.time()) for r in requests}

    async def next_events(self, num_received: int) -> tuple[Any, Any]:
        from refrain.engines.rollout.interface import EngineEvents
        from refrain.engines.store.rows import rollout_rows, to_stream

        del self._finished[: num_received - self._num_acknowledged]
        self._num_acknowledged = num_received
        await asyncio.sleep(0.1)
        progress = {
            id: int((time.time() - at) / self.token_s) for id, (_, at) in self._running.items()
        }
        for id, num_tokens in list(progress.items()):
            r, started_s = self._running[id]
            if num_tokens >= r.max_response_tokens:
                self._finished.append(self._rollout(r, started_s))
                del self._running[id], progress[id]
        told = tuple(rollout.without_tokens(row) for row, rollout in enumerate(self._finished))
        return EngineEvents(told, progress), to_stream(rollout_rows(self._finished))

    def _rollout(self, r: RolloutRequest, started_s: float) -> Rollout:
        num = r.max_response_tokens
        tokens = [token_at(r, position, 0) for position in range(num)]
        generated = Generated(tokens, [-1.0] * num, (VersionSpan(0, num),))
        return Rollout(r, generated, FinishReason.STOP, self._index, started_s, time.time())


class SlowHashes(Hashes):
    token_s = 0.12


def made_up_step() -> tuple[PolicyWeights, list[RolloutRequest]]:
    requests = [request(f"p{i}", 25 + 50 * (i % 5)) for i in range(40)]
    return PolicyWeights(0, b"", ()), requests


def real_step() -> tuple[PolicyWeights, list[RolloutRequest]]:
    from refrain.engines.data.dataset import load_dataset, load_tokenizer
    from refrain.engines.learn.learner import Learner
    from tests.inference.real import CONFIG, requests, weights_of

    dataset = load_dataset(CONFIG.data.train, load_tokenizer(CONFIG.model.path), 128)
    prompts = [prompt.token_ids for prompt in dataset.prompts[:32]]
    learner = Learner(CONFIG)
    learner.restore(None)
    return weights_of(learner, prompts), requests(prompts)


class Laps:
    """Runs of the same step."""

    def __init__(self, engines: Sequence[Any]) -> None:
        from refrain.engines.rollout.coordinator import Coordinator

        self.said: list[tuple[float, str]] = []
        self.coordinator = Coordinator(
            engines, log=lambda text: self.said.append((time.monotonic(), text))
        )

    async def take(self, weights: PolicyWeights, requests: Sequence[RolloutRequest], see: Any):
        """Run the step. Return the tokens by request, and the outcome."""
        from ray.exceptions import RayError

        from refrain.benchmarks.one_step import fetch
        from refrain.engines.rollout.interface import EngineDied

        rollouts: list[Rollout] = []

        async def keep(told: Sequence[FinishedRollout]) -> None:
            try:
                rollouts.extend(await asyncio.wait_for(fetch(told), FETCH_TIMEOUT_S))
            except RayError as error:
                raise EngineDied(told[0].engine, f"rows lost: {error}") from error

        assignments = [(i % 2, r) for i, r in enumerate(requests)]
        await self.coordinator.load_weights(weights)
        stage = self.coordinator.roll_out(assignments, keep, see)
        outcome = await asyncio.wait_for(stage, LAP_TIMEOUT_S)
        tokens = {r.id: tuple(r.generated.token_ids) for r in rollouts}
        assert len(tokens) == len(rollouts) == len(requests)
        return tokens, outcome


async def lose_a_node(node: Any, kind: str) -> dict[str, Any]:
    import ray

    from refrain.engines.inference.engine.ray_engine import RayEngine
    from refrain.engines.inference.engine.vllm_engine import VLLMEngine
    from tests.inference.real import CONFIG

    actors: dict[str, Any] = {"vllm": VLLMEngine, "node": Hashes, "raylet": SlowHashes}
    engines = [RayEngine(i, CONFIG.engine, 1, actors[kind]) for i in range(2)]
    laps = Laps(engines)
    weights, requests = real_step() if kind == "vllm" else made_up_step()
    await laps.coordinator.start()
    where = [
        await e._actor.handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        for e in engines
    ]
    doomed = where.index(node.node_id)
    killed_s: list[float] = []

    def strike(view: Any) -> None:
        there = next((e for e in view.engines if e.engine == doomed), None)
        begun = there and 0 < len(there.progress) < len(requests) / 2
        if begun and not killed_s:
            kill(node, with_all=kind != "raylet")
            killed_s.append(time.monotonic())

    tokens, _ = await laps.take(weights, requests, None)
    disturbed, outcome = await laps.take(weights, requests, strike)
    ended_s = time.monotonic()
    again, left = await laps.take(weights, requests, None)
    shown = {
        "nodes": len(set(where)),
        "tokens": sum(map(len, tokens.values())),
        "identical": disturbed == tokens and again == tokens,
        "stage_s": ended_s - killed_s[0],
        "restarts": outcome.shares[doomed].num_restarts,
        "said": [text for _, text in laps.said],
        "known_s": [at_s - killed_s[0] for at_s, _ in laps.said],
        "left": [share.engine for share in left.shares if share.num_rollouts],
        "doomed": doomed,
    }
    await laps.coordinator.shutdown()
    return shown


def main(kind: str) -> None:
    with second_node(num_cpus=2, num_gpus=1) as node:
        print(json.dumps(asyncio.run(lose_a_node(node, kind))))


if __name__ == "__main__":
    quieten()
    make_token()
    main(sys.argv[1])
