"""Responses that take new weights on real engines, in flight or deferred: each token is its
version's."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from refrain.benchmarks.one_step import fetch
from refrain.engines.learn.learner import Learner
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.moves import Close, RolloutView, Start
from refrain.schemas.rollout import Generated, Rollout, RolloutRequest, VersionSpan
from refrain.schemas.weights import PolicyWeights
from tests.inference.pace import paced
from tests.inference.real import CONFIG, requests, roll_out, weights_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]


MIDDLE_TOKENS = 8
"""Tokens of a response, on average, when the next stage comes."""


class AllAtOnce:
    """Starts all waiting requests, on the engines in turn. Closes the stage when it may."""

    def decide(self, view):
        engines = [engine.engine for engine in view.engines]
        moves = [Start(id, engines[at % len(engines)]) for at, id in enumerate(view.waiting)]
        return moves or ([Close()] if view.num_deferrable else [])


@pytest.fixture(scope="module")
def next_weights(prompts) -> PolicyWeights:
    """Weights of the next policy version, after a large update."""
    learner = Learner(CONFIG)
    learner.restore(None)
    with torch.no_grad():
        for parameter in learner._policy.parameters():
            parameter.mul_(1.05)
    return replace(weights_of(learner, prompts), policy_version=1)


def of_origin(request: RolloutRequest) -> RolloutRequest:
    """Return a deferred request as its own step drew it."""
    return replace(request, id=replace(request, deferred_from=request.id.step - 1).origin)


def begun(request: RolloutRequest, rollout: Rollout, num_tokens: int) -> RolloutRequest:
    """Return the request with the first tokens of the rollout generated."""
    of = rollout.generated
    generated = Generated(
        of.token_ids[:num_tokens],
        of.inference_logprobs[:num_tokens],
        (VersionSpan(0, num_tokens),),
    )
    return replace(request, generated=generated)


async def two_stages(
    engines: Sequence,
    versions: Sequence[PolicyWeights],
    works: Sequence[Sequence[RolloutRequest]],
    **options: Any,
) -> list[list[Rollout]]:
    """Queue a stage, and another in the middle of it. Return the rollouts of each stage."""
    coordinator = Coordinator(engines, [AllAtOnce()])
    await coordinator.load_weights(versions[0])
    told: list[list] = [[] for _ in works]
    in_the_middle = asyncio.Event()

    def show(view: RolloutView) -> None:
        if view.num_tokens > MIDDLE_TOKENS * len(works[0]):
            in_the_middle.set()

    def queue(stage: int) -> asyncio.Future:
        async def keep(rollouts):
            told[stage].extend(rollouts)

        return coordinator.roll_out(
            [(None, request) for request in works[stage]],
            keep,
            show,
            weights=versions[stage],
            **options,
        )

    async with asyncio.timeout(300), paced(engines):
        first = queue(0)
        await in_the_middle.wait()
        await asyncio.gather(first, queue(1))
    return [await fetch(found) for found in told]


@pytest.mark.parametrize(
    "options", [{"in_flight": True}, {"min_rollouts": 0}], ids=["in flight", "deferred"]
)
async def test_each_token_is_that_of_its_version(engines, prompts, weights, next_weights, options):
    """Engines go on to the next stage while responses of the first are unfinished. What a response
    had by then, and what it gained, are as on an engine that has these weights alone."""
    first = requests(prompts[:8])
    second = [replace(r, id=replace(r.id, step=2)) for r in requests(prompts[8:16])]
    told = await two_stages(engines, [weights, next_weights], [first, second], **options)
    deferred = [r for r in told[1] if r.id.sample_index < 0]
    assert bool(deferred) is ("min_rollouts" in options)
    found = told[0] + [replace(r, request=of_origin(r.request)) for r in deferred]
    of_next = [r for r in told[1] if r not in deferred]
    assert {r.id for r in found} == {r.id for r in first}
    spans = {r.id: [(s.policy_version, s.num_tokens) for s in r.generated.spans] for r in found}
    crossed = [r for r in found if [version for version, _ in spans[r.id]] == [0, 1]]
    assert len(crossed) >= len(first) // 4, spans
    alone, _ = await roll_out(engines, weights, [(0, r) for r in first])
    of = {request.id: request for request in first}
    parts = [begun(of[r.id], r, spans[r.id][0][1]) for r in crossed]
    ends, _ = await roll_out(engines, next_weights, [(0, r) for r in parts])
    for rollout in found:
        num_before = sum(num for version, num in spans[rollout.id] if version == 0)
        tokens = list(rollout.generated.token_ids)
        assert tokens[:num_before] == list(alone[rollout.id].generated.token_ids)[:num_before]
        if num_before == len(tokens):
            assert tokens == list(alone[rollout.id].generated.token_ids)
    assert {r.id: list(r.generated.token_ids) for r in crossed} == {
        id: list(rollout.generated.token_ids) for id, rollout in ends.items()
    }
    changed = sum(
        list(r.generated.token_ids) != list(alone[r.id].generated.token_ids) for r in crossed
    )
    assert changed > 2, "the next version would have sampled the same tokens"
    assert {s.policy_version for r in of_next for s in r.generated.spans} == {1}
