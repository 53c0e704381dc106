"""Virtual engines race and redraft requests under the real coordinator."""

import asyncio

import pytest

from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.moves import Race, Redraft
from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.engine import VirtualEngine
from refrain.schemas.rollout import DraftSetting, RequestId, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights
from tests.simulate.latencies import LinearLatency

LATENCY = LinearLatency(0.01, 1e-3)
BAD, GOOD = DraftSetting("bad", 2), DraftSetting("good", 2)
STEP_S = 0.011 * 1.02 + 0.002
"""Seconds of a step with one request and its drafts."""
ACCEPTANCE = {"bad": 0.0, "good": 1.0}


def request(name):
    return RolloutRequest(RequestId(Split.TRAIN, 1, name, 0), (0,) * 5, 0, 1000)


def engine_of(index, lengths, **options):
    known = {request(name).id: length for name, length in lengths.items()}
    acceptances = dict.fromkeys(known, ACCEPTANCE)
    return VirtualEngine(index, 1, LATENCY, known, acceptances=acceptances, **options)


class Once:
    """Makes one move as soon as possible, and keeps all views."""

    def __init__(self, move):
        self.move, self.views = move, []

    def decide(self, view):
        self.views.append(view)
        move, self.move = self.move, None
        return [move] if move else []


def roll_out(lengths, assignments, policy, setting=BAD):
    engines = [engine_of(i, lengths, report_s=0.2) for i in range(2)]
    finished = []

    async def keep(rollouts):
        finished.extend(rollouts)

    async def run():
        coordinator = Coordinator(engines, [policy])
        await coordinator.start()
        await coordinator.load_weights(PolicyWeights(7, b"", ()))
        for engine in engines:
            await engine.set_drafting(setting)
        return await coordinator.roll_out([(e, request(n)) for e, n in assignments], keep)

    outcome = run_virtual(run())
    return {r.request.id.prompt_key: r for r in finished}, outcome, engines


def test_the_copy_with_the_better_drafter_wins_and_the_other_stops():
    race = Once(Race(request("a").id, 1, GOOD))
    finished, outcome, engines = roll_out({"a": 400, "b": 1}, [(0, "a"), (1, "b")], race)
    assert (outcome.moves.num_raced, outcome.moves.num_races_won) == (1, 1)
    won = finished["a"]
    assert (won.engine, len(won.generated.token_ids)) == (1, 400)
    # Each step yields three tokens after the race begins, and one before.
    assert won.finished_s < 0.5 * 400 * STEP_S
    assert len(engines[0].intervals) > 0
    assert engines[0].intervals[-1].end_s <= won.finished_s + STEP_S
    assert {at.drafter for at in engines[1].intervals if not at.prefill} == {"good"}


def test_a_copy_with_a_worse_drafter_loses():
    race = Once(Race(request("a").id, 1, BAD))
    finished, outcome, _ = roll_out({"a": 300, "b": 1}, [(0, "a"), (1, "b")], race, GOOD)
    assert (outcome.moves.num_raced, outcome.moves.num_races_won) == (1, 0)
    assert finished["a"].engine == 0
    assert outcome.moves.wasted_tokens > 0
    assert finished["a"].finished_s == pytest.approx(0.01 + 100 * STEP_S)


def test_redraft_affects_only_its_request():
    redraft = Once(Redraft(request("a").id, 0, GOOD))
    finished, _, _ = roll_out({"a": 300, "b": 300}, [(0, "a"), (0, "b")], redraft)
    assert finished["a"].request.drafting == GOOD
    assert finished["b"].request.drafting is None
    assert finished["a"].generated.num_accepted_tokens > 150
    assert finished["b"].generated.num_accepted_tokens == 0
    assert finished["a"].finished_s < 0.5 * finished["b"].finished_s


def test_views_count_drafting_since_the_last_change():
    redraft = Once(Redraft(request("a").id, 0, GOOD))
    roll_out({"a": 600, "b": 600}, [(0, "a"), (0, "b")], redraft)
    told = [view.engines[0].drafting for view in redraft.views]
    rates = {id.prompt_key: at.acceptance for of in told[2:] for id, at in of.items()}
    assert rates == {"a": 1.0, "b": 0.0}
    settings = {at.setting for of in told[2:] for id, at in of.items() if id.prompt_key == "a"}
    assert settings == {GOOD}


def test_copy_has_generated_tokens_and_its_request_continues():
    engines = [engine_of(i, {"a": 100}) for i in range(2)]
    id = request("a").id

    async def run():
        for engine in engines:
            await engine.load_weights(PolicyWeights(7, b"", ()))
            await engine.set_drafting(GOOD)
        await engines[0].submit([request("a")])
        await asyncio.sleep(0.2)
        (copy,) = await engines[0].copy([id, request("gone").id])
        now_s = asyncio.get_running_loop().time()
        (rollout,) = (await engines[0].next_events()).finished
        assert await engines[0].copy([id]) == []
        return copy, now_s, rollout

    copy, now_s, rollout = run_virtual(run())
    steps = round((now_s - 0.01) / STEP_S)
    assert 0.2 <= now_s <= 0.2 + STEP_S
    assert len(copy.generated.token_ids) == 1 + 3 * steps
    assert copy.generated.num_draft_tokens == 2 * steps == copy.generated.num_accepted_tokens
    assert len(rollout.generated.token_ids) == 100
    assert rollout.finished_s == pytest.approx(0.01 + 33 * STEP_S)
