"""Virtual engines, driven by the real coordinator."""

import asyncio

import pytest

from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.moves import Migrate
from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.engine import VirtualEngine
from refrain.schemas.rollout import DraftSetting, FinishReason, RequestId, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights
from tests.simulate.latencies import LinearLatency

LATENCY = LinearLatency(0.01, 1e-3)
NGRAM = DraftSetting("ngram", 2)
DRAFTING_S = 0.011 * 1.02 + 0.002
"""Seconds of a step of one request that drafts with `NGRAM`."""


def request(name: str, limit: int = 1000) -> RolloutRequest:
    return RolloutRequest(RequestId(Split.TRAIN, 1, name, 0), (0,) * 5, 0, limit)


def roll_out(lengths, assignments, num_engines=2, policies=(), **options):
    """Return the rollouts by name, the shares and the engines."""
    known = {request(name).id: length for name, length in lengths.items()}
    engines = [VirtualEngine(i, 1, LATENCY, known, **options) for i in range(num_engines)]
    finished = {}

    async def keep(rollouts):
        finished.update((r.request.id.prompt_key, r) for r in rollouts)

    async def run():
        coordinator = Coordinator(engines, policies)
        await coordinator.start()
        await coordinator.load_weights(PolicyWeights(7, b"", ()))
        outcome = await coordinator.roll_out([(e, request(n)) for e, n in assignments], keep)
        return outcome.shares

    return finished, run_virtual(run()), engines


def test_times_are_those_of_the_model():
    finished, shares, engines = roll_out({"a": 3, "b": 5}, [(0, "a"), (1, "b")])
    assert finished["a"].finished_s == pytest.approx(0.01 + 2 * 0.011)
    assert finished["b"].finished_s == pytest.approx(0.01 + 4 * 0.011)
    assert [share.num_tokens for share in shares] == [3, 5]
    assert [share.busy_s for share in shares] == pytest.approx([0.032, 0.054])
    assert [i.prefill for i in engines[0].intervals] == [True, False]


def test_rollouts_have_their_length_and_version():
    finished, *_ = roll_out({"a": 300}, [(0, "a")])
    generated = finished["a"].generated
    assert len(generated.token_ids) == len(generated.inference_logprobs) == 300
    assert [(s.policy_version, s.num_tokens) for s in generated.spans] == [(7, 300)]
    assert finished["a"].finish_reason is FinishReason.STOP


class MoveOnce:
    """Moves request "a" to engine 1 when it has made half of its tokens."""

    def __init__(self):
        self.views = []

    def decide(self, view):
        self.views.append(view)
        on_first = view.engines[0].progress
        return [Migrate(id, 1) for id, n in on_first.items() if id.prompt_key == "a" and n >= 50]


def test_migrated_request_continues_where_it_was():
    policy = MoveOnce()
    assignments = [(0, "a"), (0, "b"), (1, "c")]
    lengths = {"a": 100, "b": 90, "c": 10}
    finished, shares, engines = roll_out(lengths, assignments, policies=[policy], report_s=0.05)
    assert {name: len(r.generated.token_ids) for name, r in finished.items()} == lengths
    assert finished["a"].engine == 1
    assert [e.num_withdrawn for e in engines] == [1, 0]
    assert sum(s.num_tokens for s in finished["a"].generated.spans) == 100
    assert [share.num_rollouts for share in shares] == [1, 2]
    assert all(
        later.elapsed_s >= earlier.elapsed_s
        for earlier, later in zip(policy.views, policy.views[1:], strict=False)
    )


def test_a_request_is_cut_at_its_limit():
    engine = VirtualEngine(0, 1, LATENCY, {request("a").id: 500})

    async def run():
        await engine.load_weights(PolicyWeights(0, b"", ()))
        await engine.submit([request("a", limit=20)])
        (rollout,) = (await engine.next_events()).finished
        return rollout

    rollout = run_virtual(run())
    assert rollout.finish_reason is FinishReason.LENGTH
    assert len(rollout.generated.token_ids) == 20


def test_request_finished_before_withdrawal_is_an_event():
    engine = VirtualEngine(0, 1, LATENCY, {request("a").id: 2})

    async def run():
        await engine.load_weights(PolicyWeights(0, b"", ()))
        await engine.submit([request("a")])
        await asyncio.sleep(0.015)
        assert await engine.withdraw([request("a").id]) == []
        return await engine.next_events()

    assert len(run_virtual(run()).finished) == 1


def test_a_change_of_drafting_holds_from_the_end_of_the_step():
    """At 0.5 s the 45th step is under way. 24 tokens are left, at 1.75 a step."""
    engine = VirtualEngine(0, 1, LATENCY, {request("a").id: 70}, acceptances={request("a").id: 0.5})

    async def run():
        await engine.load_weights(PolicyWeights(0, b"", ()))
        await engine.submit([request("a")])
        events = asyncio.create_task(engine.next_events())
        await asyncio.sleep(0.5)
        await engine.set_drafting(NGRAM)
        (rollout,) = (await events).finished
        return rollout, asyncio.get_running_loop().time()

    rollout, now_s = run_virtual(run())
    assert rollout.finished_s == now_s == pytest.approx(0.01 + 45 * 0.011 + 14 * DRAFTING_S)
    generated = rollout.generated
    assert len(generated.token_ids) == 70
    assert generated.num_verifications == 14
    assert generated.num_draft_tokens == 28
    assert generated.num_accepted_tokens == 24 - 14


def test_progress_is_what_is_whole_of_the_tokens_so_far():
    id = request("a").id
    engine = VirtualEngine(0, 1, LATENCY, {id: 100}, acceptances={id: 0.5}, report_s=0.1)

    async def run():
        await engine.load_weights(PolicyWeights(0, b"", ()))
        await engine.set_drafting(NGRAM)
        await engine.submit([request("a")])
        seen = []
        while not (events := await engine.next_events()).finished:
            seen.append((asyncio.get_running_loop().time(), dict(events.progress)))
        return seen

    seen = run_virtual(run())
    assert len(seen) == 7
    for now_s, progress in seen:
        steps = int((now_s - 0.01) / DRAFTING_S + 1e-6)
        assert progress == {id: 1 + int(1.75 * steps)}


@pytest.mark.parametrize("settings", [(NGRAM, NGRAM), (NGRAM, None), (None, NGRAM)])
def test_a_move_keeps_whole_tokens_and_what_was_drafted(settings):
    id = request("a").id
    engines = [VirtualEngine(i, 1, LATENCY, {id: 100}, acceptances={id: 0.8}) for i in range(2)]

    async def run():
        for engine, setting in zip(engines, settings, strict=True):
            await engine.load_weights(PolicyWeights(engine.index, b"", ()))
            await engine.set_drafting(setting)
        await engines[0].submit([request("a")])
        await asyncio.sleep(0.33)
        (moved,) = await engines[0].withdraw([id])
        await engines[1].submit([moved])
        (rollout,) = (await engines[1].next_events()).finished
        return moved.generated, rollout.generated

    before, after = run_virtual(run())
    moved_at = len(before.token_ids)
    assert moved_at == sum(span.num_tokens for span in before.spans)
    if settings[0]:
        # At 0.33 s, 24 steps have ended and one is under way, at 2.44 tokens each.
        assert moved_at == 1 + int(2.44 * 25)
        assert (before.num_verifications, before.num_draft_tokens) == (25, 50)
        assert before.num_accepted_tokens == moved_at - 1 - 25
    else:
        assert before.num_draft_tokens == before.num_verifications == 0
    assert [span.num_tokens for span in after.spans] == [moved_at, 100 - moved_at]
    assert len(after.token_ids) == 100
    verified = after.num_verifications - before.num_verifications
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    if settings[1]:
        assert accepted + verified == 100 - moved_at - 1
        assert after.num_draft_tokens - before.num_draft_tokens == 2 * verified
    else:
        assert accepted == verified == 0
