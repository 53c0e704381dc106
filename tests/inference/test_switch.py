"""Requests move to engines of another TP degree in the middle of a response.

No token changes, whether keys and values move too or not.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio

from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import index_path, write_index
from refrain.engines.inference.engine.parking import HostMemory
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.rollout.interface import WeightSyncError
from refrain.engines.rollout.moves import Reshape, RolloutView
from refrain.schemas.drafting import DraftingConfig, SpecActorConfig
from refrain.schemas.layout import Pool
from tests.inference.pace import dial, paced
from tests.inference.real import CONFIG, requests, roll_out
from tests.inference.switching import (
    MOVED_AT,
    Moved,
    assert_as_before,
    assert_moved,
    assert_recomputed,
    begin,
    double_requests,
    engine_of,
    finished_on,
    generate,
    load,
    longest,
    move,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]


@pytest_asyncio.fixture(loop_scope="package")
async def tp4(ray_cluster):
    """Engine 3, with TP 4."""
    assert ray_cluster.is_initialized()
    off = {"drafting": DraftingConfig(enabled=False), "specactor": SpecActorConfig()}
    engine = engine_of(3, 4, **off)
    await engine.start()
    yield engine
    await engine.shutdown()


@asynccontextmanager
async def greedy(engines: Sequence[RayEngine]) -> AsyncIterator[None]:
    async def set_temperature(temperature: float) -> None:
        for engine in engines:
            await engine._actor.handle.__ray_call__.remote(_set_temperature, temperature)

    await set_temperature(0.0)
    try:
        yield
    finally:
        await set_temperature(CONFIG.rollout.temperature)


def _set_temperature(engine, temperature: float) -> None:
    rollout = engine._config.rollout.model_copy(update={"temperature": temperature})
    engine._config = engine._config.model_copy(update={"rollout": rollout})


async def test_from_two_engines_to_one_of_twice_their_tp_degree(
    engines, tp2, weights, long_requests, without_switch
):
    for keep_kv, check in ((False, assert_recomputed), (True, assert_moved)):
        await load([*engines, tp2], weights)
        moved = await move(engines, tp2, long_requests, keep_kv=keep_kv)
        assert_as_before(moved.finished, without_switch)
        check(moved)
    assert len({request.kv.path for request in moved.requests}) == 2


async def test_greedy(engines, tp2, weights, prompts):
    """The same holds at temperature 0."""
    await load([*engines, tp2], weights)
    async with greedy([*engines, tp2]):
        todo = double_requests(prompts)[::4]
        expected = await generate(engines[0], todo)
        long_requests = longest(todo, expected)
        for keep_kv, check in ((False, assert_recomputed), (True, assert_moved)):
            await load([*engines, tp2], weights)
            moved = await move(engines, tp2, long_requests, keep_kv=keep_kv)
            assert_as_before(moved.finished, expected)
            check(moved)


@pytest.mark.slow
async def test_up_again_and_down_again(engines, tp2, tp4, weights, long_requests):
    """Move from TP 2 to TP 4, and from there to TP 2 and TP 1.

    Use few requests, because four ranks on two cores are slow.
    """
    todo = [replace(request, max_response_tokens=64) for request in long_requests[-4:]]
    await load(engines[:1], weights)
    expected = await generate(engines[0], todo)
    for source, target, keep_kv in (
        (tp2, tp4, False),
        (tp2, tp4, True),
        (tp4, tp2, True),
        (tp4, engines[0], True),
    ):
        await load([source, target], weights)
        moved = await move([source], target, todo, keep_kv=keep_kv)
        assert_as_before(moved.finished, expected)
        (assert_moved if keep_kv else assert_recomputed)(moved)


async def test_drafts_from_history_go_on_after_a_move(
    engines, tp2, weights, long_requests, without_switch, history
):
    for request in long_requests:
        key, prompt = request.id.prompt_key, request.prompt_token_ids
        group = [r for r in without_switch.values() if r.id.prompt_key == key]
        index = build_index(prompt, [r.generated.token_ids for r in group], [0.0, 1.0, 0.5, 1.0])
        write_index(index, key, index_path(history, key))
    await dial([tp2], 1.0)
    for keep_kv in (False, True):
        await load([engines[0], tp2], weights)
        moved = await move(engines[:1], tp2, long_requests, keep_kv=keep_kv)
        assert_as_before(moved.finished, without_switch)
        counts = await tp2.take_drafting_counts()
        assert counts.num_drafting_steps > 0
        assert isinstance(counts.step_costs, tuple)
        drafted = [moved.finished[request.id].generated for request in moved.requests]
        assert sum(g.num_accepted_tokens for g in drafted) > 100
        # Draft tokens that vLLM adds only to pad a step do not count.
        assert all(g.num_draft_tokens >= g.num_accepted_tokens > 0 for g in drafted)
    await dial([tp2], 1.0, gate=True)


async def test_taken_in_prefill(engines, tp2, weights, prompts):
    """The prompts have more tokens than a step, so some requests leave during their prefill."""
    many = [token for prompt in prompts for token in prompt] * 2
    todo = [
        replace(r, prompt_token_ids=tuple(many[20 * i :][:300]), max_response_tokens=16)
        for i, r in enumerate(requests(prompts)[:48])
    ]
    source, target = engines[0], tp2
    await load([source, target], weights)
    expected = await generate(source, todo)
    for keep_kv in (False, True):
        await load([source, target], weights)
        await source.submit(todo)
        moved = await source.withdraw([r.id for r in todo], keep_kv=keep_kv)
        assert not all(request.generated for request in moved), "no request left during its prefill"
        assert all(bool(r.kv) == bool(keep_kv and r.generated) for r in moved)
        finished = await generate(target, moved)
        assert_as_before(finished, expected)
    assert any(rollout.num_cached_tokens for rollout in finished.values())


async def test_taken_before_it_began(engines, weights, long_requests, without_switch):
    """A request withdrawn right after its submission generates the same tokens later."""
    await load(engines[:1], weights)
    ids = [request.id for request in long_requests]
    for keep_kv in (False, True):
        _, moved = await asyncio.gather(
            engines[0].submit(long_requests), engines[0].withdraw(ids, keep_kv=keep_kv)
        )
        assert [request.id for request in moved] == ids
        num_generated = sum(len(r.generated.token_ids) if r.generated else 0 for r in moved)
        # A fast machine runs some steps before the withdrawal.
        num_whole = sum(len(without_switch[id].generated.token_ids) for id in ids)
        assert num_generated < num_whole / 10, (num_generated, num_whole)
    assert_as_before(await generate(engines[0], moved), without_switch)


async def test_request_moved_before_running_keeps_its_kv(
    engines, tp2, weights, long_requests, without_switch
):
    """A paused engine passes requests on with the keys and values that they came with."""
    source, between, target = engines[0], engines[1], tp2

    def pause(engine) -> None:
        pausing = engine._llm.pause_generation(mode="keep", clear_cache=False)
        loop = engine._llm.output_handler.get_loop()
        asyncio.run_coroutine_threadsafe(pausing, loop).result(10)

    await load([source, between, target], weights)
    await begin(source, long_requests)
    moved = await source.withdraw([r.id for r in long_requests], keep_kv=True)
    await between._actor.handle.__ray_call__.remote(pause)
    await between.submit(moved)
    again = await between.withdraw([r.id for r in moved], keep_kv=True)
    assert {r.id: r.kv for r in again} == {r.id: r.kv for r in moved}
    finished = await generate(target, again)
    assert_as_before(finished, without_switch)
    assert_moved(Moved(again, finished))
    await finished_on(source, len(long_requests) - len(moved))


async def test_remaining_requests_continue_after_a_withdrawal(
    engines, tp2, weights, long_requests, without_switch
):
    """After a withdrawal, the source goes on with its other requests."""
    source, target = engines[1], tp2
    await load([source, target], weights)
    await source.take_kv_counts()
    await begin(source, long_requests)
    moved = await source.withdraw([r.id for r in long_requests[::2]], keep_kv=True)
    assert moved
    finished = await generate(target, moved)
    stayed = await finished_on(source, len(long_requests) - len(moved))
    assert_as_before(stayed | finished, without_switch)
    counts = await source.take_kv_counts()
    assert (counts.num_withdrawals, counts.num_saved) == (1, len(moved))
    assert counts.num_bytes > 0
    assert min(counts.pause_s, counts.export_s, counts.resume_s) > 0


class SleepOnCpu:
    """Fake of sleep mode. Without its KV cache, the engine computes nothing while it is parked."""

    has_weights = has_kv_cache = True

    async def leave(self, *, weights: bool) -> None:
        assert not weights, "parking keeps the weights"
        self.has_kv_cache = False

    async def take_weights(self) -> None: ...

    async def take_kv_cache(self) -> None:
        self.has_kv_cache = True


def _set_memory(engine, memory: SleepOnCpu | None) -> None:
    engine._memory = memory or HostMemory(engine._llm)


async def test_parked_and_woken(tp2, weights, long_requests, without_switch):
    engine = tp2
    await load([engine], weights)
    await engine.park()
    assert await engine.wake()
    await engine.park()
    await load([engine], weights)
    assert await engine.wake()
    assert_as_before(await generate(engine, long_requests[:2]), without_switch)


async def test_weights_that_come_while_parked_are_checked_at_the_latest_when_woken(tp2, weights):
    engine = tp2
    canary = weights.canaries[0]
    shifted = tuple(x - 1.0 for x in canary.trainer_logprobs)
    wrong = replace(canary, trainer_logprobs=shifted, rounded_logprobs=shifted)
    await engine._actor.handle.__ray_call__.remote(_set_memory, SleepOnCpu())
    await engine.park()
    await engine.load_weights(weights)
    assert await engine.wake()
    await engine.park()
    assert await engine.load_weights(replace(weights, canaries=(wrong,))) == 0.0
    with pytest.raises(WeightSyncError, match=r"engine 2 after .* differs from the trainer"):
        await engine.wake()
    await engine._actor.handle.__ray_call__.remote(_set_memory, None)


class SwitchInTheMiddle:
    """Policy that switches the pool to TP 2 once, when a response is long enough.

    `kill`: kill the target at the same time, while keys and values are saved for it or sent to it.
    """

    def __init__(self, target: RayEngine, *, kill: bool) -> None:
        self.target, self.kill, self.decided = target, kill, False

    def decide(self, view: RolloutView) -> list[Reshape]:
        longest = max((max(e.progress.values(), default=0) for e in view.engines), default=0)
        if self.decided or longest < MOVED_AT:
            return []
        self.decided = True
        if self.kill:
            self.target._actor.kill()
        return [Reshape(0, 2)]


class BeginIn:
    """Policy that begins stages in the layout with this TP degree."""

    def __init__(self, tp_degree: int) -> None:
        self.tp_degree = tp_degree

    def begin(self, view: RolloutView) -> list[Reshape]:
        assert not any(num for engine in view.engines for num in engine.progress.values())
        return [Reshape(0, self.tp_degree)]

    def decide(self, _: RolloutView) -> list[Reshape]:
        return []


@pytest.mark.parametrize(("tp_degree", "working"), [(1, {0, 1}), (2, {2})])
async def test_a_step_begins_in_each_layout(
    engines, tp2, weights, prompts, without_switch, tp_degree, working
):
    todo = [(i % 2, request) for i, request in enumerate(double_requests(prompts))]
    pools = [Pool(0, {1: (0, 1), 2: (2,)})]
    finished, outcome = await roll_out(
        [*engines, tp2], weights, todo, [BeginIn(tp_degree)], pools=pools
    )
    assert_as_before(finished, without_switch)
    assert len(finished) == len(todo)
    assert {rollout.engine for rollout in finished.values()} == working
    assert outcome.moves.num_switches == 0
    await asyncio.gather(*(engine.wake() for engine in (*engines, tp2)))


@pytest.mark.parametrize("kill", [False, True])
async def test_the_coordinator_switches_and_a_death_in_it_loses_nothing(
    engines, tp2, weights, prompts, without_switch, kill
):
    switching = SwitchInTheMiddle(tp2, kill=kill)
    todo = [(i % 2, request) for i, request in enumerate(double_requests(prompts))]
    pools = [Pool(0, {1: (0, 1), 2: (2,)})]
    async with paced(engines):
        finished, outcome = await roll_out([*engines, tp2], weights, todo, [switching], pools=pools)
    assert_as_before(finished, without_switch)
    assert len(finished) == len(todo)
    # There is no switch if the target is dead before keys and values are saved ahead.
    assert outcome.moves.num_switches in ((0, 1) if kill else (1,))
    by_engine = {share.engine: share for share in outcome.shares}
    moved = by_engine[2].num_rollouts
    if kill:
        assert (moved, by_engine[2].num_restarts) == (0, 1)
    else:
        assert moved > len(todo) / 4
        cached = [r.num_cached_tokens for r in finished.values() if r.engine == 2]
        assert sum(num > 0 for num in cached) > moved / 2, "keys and values did not move"
    await tp2.wake()
