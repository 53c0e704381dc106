"""Virtual engines park and wake on shared GPUs, and save keys and values for other engines."""

import asyncio
from dataclasses import replace

import pytest

from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.engine import SwitchTimes, VirtualEngine
from refrain.schemas.rollout import RequestId, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights
from tests.simulate.latencies import LinearLatency

LATENCY = LinearLatency(0.01, 1e-3)
STEP_S, PREFILL_S = 0.011, 0.01
WEIGHTS = PolicyWeights(7, b"", ())
TIMES = SwitchTimes(
    wake_s=2.0, save_s=lambda tokens: 0.1 * tokens, load_s=lambda tokens: 1.0 + 0 * tokens
)
PROMPT_TOKENS = 5


def request(name: str = "a") -> RolloutRequest:
    return RolloutRequest(RequestId(Split.TRAIN, 1, name, 0), (0,) * PROMPT_TOKENS, 0, 1000)


def engine(tp_degree: int = 1, length: int = 100, switch=TIMES, **options) -> VirtualEngine:
    lengths = {request(name).id: length for name in "abc"}
    return VirtualEngine(0, tp_degree, LATENCY, lengths, switch=switch, **options)


async def ready(engine: VirtualEngine) -> VirtualEngine:
    await engine.start()
    await engine.load_weights(WEIGHTS)
    return engine


async def halfway(**options):
    """Return a request withdrawn after its prefill and 10 steps, and the seconds that took."""
    source = await ready(engine(tp_degree=2))
    await source.submit([request()])
    await asyncio.sleep(PREFILL_S + 10 * STEP_S)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    (taken,) = await source.withdraw([request().id], **options)
    return taken, loop.time() - began_s


async def finish(request: RolloutRequest) -> tuple[float, object]:
    """Return the seconds that another engine takes to finish the request, and the rollout."""
    target = await ready(engine())
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await target.submit([request])
    events = await target.next_events()
    return loop.time() - began_s, events.finished[0]


def test_saved_kv_lacks_only_the_last_token():
    taken, seconds = run_virtual(halfway(keep_kv=True))
    assert len(taken.generated.token_ids) == 11
    assert (taken.kv.num_tokens, taken.kv.tp_degree) == (PROMPT_TOKENS + 10, 2)
    assert seconds == pytest.approx(0.1 * (PROMPT_TOKENS + 10))


def test_precopy_saves_kv_while_requests_continue():
    """Tokens made during the copy are saved when the request is withdrawn."""

    async def saved_ahead():
        source = await ready(engine(tp_degree=2, length=900, switch=replace(TIMES, ahead=True)))
        await source.submit([request()])
        await asyncio.sleep(PREFILL_S + 10 * STEP_S)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        saved = await source.precopy([request().id])
        ahead_s = loop.time() - began_s
        (taken,) = await source.withdraw([request().id], keep_kv=True)
        return saved, ahead_s, taken, loop.time() - began_s - ahead_s

    saved, ahead_s, taken, seconds = run_virtual(saved_ahead())
    assert saved.num_tokens == PROMPT_TOKENS + 10
    assert ahead_s == pytest.approx(1.5)
    num_since = len(taken.generated.token_ids) - 11
    assert num_since == pytest.approx(1.5 / STEP_S, abs=1)
    assert seconds == pytest.approx(0.1 * num_since, abs=STEP_S)


def test_without_it_nothing_is_saved_ahead():
    async def nothing():
        source = await ready(engine())
        await source.submit([request()])
        return await source.precopy([request().id])

    assert run_virtual(nothing()) is None


def test_nothing_is_saved_unless_told():
    taken, seconds = run_virtual(halfway())
    assert taken.kv is None
    assert seconds == 0.0


def test_with_keys_and_values_nothing_is_prefilled():
    async def both():
        moved, _ = await halfway(keep_kv=True)
        return await finish(moved), await finish(replace(moved, kv=None))

    (moved_s, moved), (again_s, again) = run_virtual(both())
    assert moved_s == pytest.approx(1.0 + 89 * STEP_S)
    assert again_s == pytest.approx(PREFILL_S + 88 * STEP_S)
    assert moved.num_cached_tokens == PROMPT_TOKENS + 10
    assert again.num_cached_tokens == 0
    assert len(moved.generated.token_ids) == len(again.generated.token_ids) == 100


def test_requests_without_kv_move_without_it():
    async def run():
        source = await ready(engine(max_num_seqs=1))
        await source.submit([request("a"), request("b")])
        await asyncio.sleep(PREFILL_S / 2)
        prefilling, waiting = await source.withdraw([request(n).id for n in "ab"], keep_kv=True)
        await source.submit([request("c"), prefilling])
        await asyncio.sleep(PREFILL_S + STEP_S)
        return [prefilling, waiting, *await source.withdraw([request("c").id], keep_kv=True)]

    prefilling, waiting, running = run_virtual(run())
    assert prefilling.kv is None
    assert waiting.kv is None
    assert running.kv is not None


def test_preempted_request_is_prefilled_again():
    async def run():
        source = await ready(engine(length=60, max_context_tokens=100))
        await source.submit([request("a"), request("b")])
        await asyncio.sleep(60 * STEP_S)
        taken = await source.withdraw([request("b").id], keep_kv=True)
        assert source.num_preempted == 1
        return taken

    (preempted,) = run_virtual(run())
    assert preempted.generated.token_ids
    assert preempted.kv is None


def test_a_parked_engine_takes_nothing_until_it_is_woken():
    async def run():
        parked = await ready(engine())
        await parked.park()
        with pytest.raises(AssertionError, match="parked"):
            await parked.submit([request()])
        assert await parked.wake()
        woken_s = asyncio.get_running_loop().time()
        await parked.submit([request()])
        with pytest.raises(AssertionError, match="empty"):
            await parked.park()
        return woken_s

    assert run_virtual(run()) == pytest.approx(TIMES.wake_s)
