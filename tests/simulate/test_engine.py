"""Virtual engines under the real coordinator."""

import asyncio

import pytest

from engines.rollout.coordinator import Coordinator
from engines.rollout.moves import Migrate
from engines.simulate.clock import run_virtual
from engines.simulate.engine import VirtualEngine
from schemas.rollout import FinishReason, RequestId, RolloutRequest, Split
from schemas.weights import PolicyWeights
from tests.simulate.latencies import LinearLatency

LATENCY = LinearLatency(0.01, 1e-3)


def request(name: str, limit: int = 1000) -> RolloutRequest:
    return RolloutRequest(RequestId(Split.TRAIN, 1, name, 0), (0,) * 5, 0, limit)


def roll_out(lengths, assignments, num_engines=2, policies=(), **options):
    """Rollouts by name, shares, engines."""
    known = {request(name).id: length for name, length in lengths.items()}
    engines = [VirtualEngine(i, 1, LATENCY, known, **options) for i in range(num_engines)]
    finished = {}

    async def keep(rollouts):
        finished.update((r.request.id.prompt_key, r) for r in rollouts)

    async def run():
        coordinator = Coordinator(engines, policies)
        await coordinator.start()
        await coordinator.load_weights(PolicyWeights(7, b"", ()))
        return await coordinator.roll_out([(e, request(n)) for e, n in assignments], keep)

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
    """Moves request "a" to engine 1 when it is half done."""

    def __init__(self):
        self.views = []

    def decide(self, view):
        self.views.append(view)
        on_first = view.engines[0].progress
        return [Migrate(id, 1) for id, n in on_first.items() if id.prompt_key == "a" and n >= 50]


def test_a_migrated_request_goes_on_where_it_was():
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


def test_progress_is_what_the_steps_so_far_have_made():
    policy = MoveOnce()
    roll_out({"c": 100}, [(0, "c")], num_engines=1, policies=[policy], report_s=0.11)
    for view in policy.views[:-1]:
        (tokens,) = view.engines[0].progress.values()
        assert tokens == 1 + int((view.elapsed_s - 0.01) / 0.011 + 1e-6)
    assert len(policy.views) >= 9


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


def test_what_has_finished_meanwhile_comes_as_an_event():
    engine = VirtualEngine(0, 1, LATENCY, {request("a").id: 2})

    async def run():
        await engine.load_weights(PolicyWeights(0, b"", ()))
        await engine.submit([request("a")])
        await asyncio.sleep(0.015)
        assert await engine.withdraw([request("a").id]) == []
        return await engine.next_events()

    assert len(run_virtual(run()).finished) == 1
