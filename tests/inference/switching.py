"""Helpers for tests that move requests between engines in the middle of a response.

A move must change no token.

    engines 0, 1    TP 1; the second one drafts     model: 4 attention heads, 2 KV heads
    engine 2        TP 2, drafts from history       one KV head a rank
    engine 3        TP 4, in slow tests only        two ranks have the same KV head
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from refrain.benchmarks.one_step import fetch
from refrain.engines.inference.engine.arguments import CPU_BLOCK_TOKENS
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest, SavedKV
from tests.inference.pace import STEP_S, PacedEngine, set_pace
from tests.inference.real import CONFIG, requests

NUM_REQUESTS = 8
MOVED_AT = 24
"""Tokens of the longest response when requests are withdrawn. The shortest then has at least 8."""
BLOCK = CPU_BLOCK_TOKENS


def engine_of(index: int, tp_degree: int, **changes) -> RayEngine:
    config = CONFIG.engine
    rollout = config.rollout.model_copy(update={"tp_degree": tp_degree})
    changed = {"rollout": rollout, "pooled": True, **changes}
    config = config.model_copy(update=changed)
    return RayEngine(index, config, num_gpus=0, engine_class=PacedEngine)


def double_requests(prompts) -> list[RolloutRequest]:
    """Return requests with two prompts joined in each, so that many are longer than a block."""
    return requests([(*prompts[i - 1], *prompts[i]) for i in range(len(prompts))])


def longest(
    todo: Sequence[RolloutRequest], finished: dict[RequestId, Rollout]
) -> list[RolloutRequest]:
    """Return the requests with the longest responses, which a test can catch in the middle.

    Take one request per prompt: responses that begin alike would find each other's blocks in the
    prefix cache.
    """

    def num_tokens(request: RolloutRequest) -> int:
        return len(finished[request.id].generated.token_ids)

    of_prompts = {r.id.prompt_key: r for r in sorted(todo, key=num_tokens)}
    longest = sorted(of_prompts.values(), key=num_tokens)[-NUM_REQUESTS:]
    assert num_tokens(longest[0]) > 2 * MOVED_AT
    assert len(longest[-1].prompt_token_ids) + num_tokens(longest[-1]) > BLOCK + MOVED_AT
    return longest


@dataclass
class Moved:
    """The result of a move."""

    requests: Sequence[RolloutRequest]
    """Requests as the source returned them when they were withdrawn."""
    finished: dict[RequestId, Rollout]
    """All rollouts, including those that did not move."""

    @property
    def cached(self) -> list[tuple[int, int]]:
        """Return (tokens that needed no prefill, tokens before the move) of each moved request."""
        return [
            (
                self.finished[r.id].num_cached_tokens,
                len(r.prompt_token_ids) + (len(r.generated.token_ids) if r.generated else 0),
            )
            for r in self.requests
        ]


async def finished_on(engine: RayEngine, num: int) -> dict[RequestId, Rollout]:
    """Return the next `num` rollouts that finish there, at full speed."""
    await set_pace(engine, 0.0)
    finished: dict[RequestId, Rollout] = {}
    async with asyncio.timeout(90):
        while len(finished) < num:
            told = (await engine.next_events()).finished
            finished |= {rollout.id: rollout for rollout in await fetch(told)}
    return finished


async def generate(engine: RayEngine, todo: Sequence[RolloutRequest]) -> dict[RequestId, Rollout]:
    await engine.submit(todo)
    return await finished_on(engine, len(todo))


async def begin(engine: RayEngine, todo: Sequence[RolloutRequest]) -> None:
    """Submit the requests and generate slowly until they have enough tokens to be moved."""
    await set_pace(engine, STEP_S)
    await engine.submit(todo)
    async with asyncio.timeout(90):
        while True:
            so_far = await engine.copy([request.id for request in todo])
            num_tokens = [len(r.generated.token_ids) if r.generated else 0 for r in so_far]
            if not so_far or (min(num_tokens) >= 8 and max(num_tokens) >= MOVED_AT):
                return
            await asyncio.sleep(0.01)


async def move(
    sources: Sequence[RayEngine],
    target: RayEngine,
    todo: Sequence[RolloutRequest],
    *,
    keep_kv: bool,
    ahead: bool = False,
    meanwhile: Callable[[Sequence[RolloutRequest]], None] = lambda _: None,
) -> Moved:
    """Begin on the sources and continue on the target.

    `ahead`: save keys and values before the withdrawal too. `meanwhile`: receives the withdrawn
    requests before the target does.
    """
    dealt = [todo[i :: len(sources)] for i in range(len(sources))]
    pairs = list(zip(sources, dealt, strict=True))

    async def begin_and_save(engine: RayEngine, part: Sequence[RolloutRequest]) -> SavedKV | None:
        # Do not wait for the other sources: requests might end meanwhile.
        await begin(engine, part)
        return await engine.precopy([r.id for r in part]) if ahead else None

    saved = await asyncio.gather(*(begin_and_save(engine, part) for engine, part in pairs))
    if ahead:
        assert all(saved)
        await target.expect_kv(saved)
    left = [await engine.withdraw([r.id for r in part], keep_kv=keep_kv) for engine, part in pairs]
    finished: dict[RequestId, Rollout] = {}
    for (engine, part), leaving in zip(pairs, left, strict=True):
        finished |= await finished_on(engine, len(part) - len(leaving))
    moved = [request for leaving in left for request in leaving]
    assert len(moved) >= len(todo) // 2, "too few requests were moved in the middle"
    if ahead:
        assert {request.kv.path for request in moved} == {one.path for one in saved}
    meanwhile(moved)
    finished |= await generate(target, moved)
    assert len(finished) == len(todo)
    return Moved(moved, finished)


def assert_as_before(finished: dict[RequestId, Rollout], expected: dict[RequestId, Rollout]):
    for id, rollout in finished.items():
        assert rollout.generated.token_ids == expected[id].generated.token_ids
        assert rollout.finish_reason == expected[id].finish_reason
        assert rollout.generated.inference_logprobs == pytest.approx(
            expected[id].generated.inference_logprobs, abs=1e-4
        )


def assert_most_differ(moved: Moved, expected: dict[RequestId, Rollout]) -> None:
    same = [
        moved.finished[r.id].generated.token_ids == expected[r.id].generated.token_ids
        for r in moved.requests
    ]
    assert sum(same) < len(same) / 2


def files_of(moved: Sequence[RolloutRequest]) -> set[Path]:
    return {path for request in moved for path in Path(request.kv.path).iterdir()}


def zero_files(files: Iterable[Path]) -> None:
    for path in files:
        whole = path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        path.write_bytes(whole[:header] + b"\0" * (len(whole) - header))


def assert_moved(moved: Moved) -> None:
    for request, (cached, before) in zip(moved.requests, moved.cached, strict=True):
        assert request.kv is not None
        assert request.kv.num_tokens == before - 1
        # The last token has no keys and values yet. An engine that drafts computes two tokens.
        assert before - 2 <= cached <= before - 1


def assert_recomputed(moved: Moved) -> None:
    """Assert that each request computed its context again.

    Prompts may share a beginning, which one request computes for all.
    """
    for request, (cached, _) in zip(moved.requests, moved.cached, strict=True):
        assert cached < len(request.prompt_token_ids)


async def load(engines: Sequence[RayEngine], weights) -> None:
    """Load weights, which also empties the prefix caches."""
    await asyncio.gather(*(engine.load_weights(weights) for engine in engines))
