"""Real draft models draft for real engines on Ray, and change no token."""

import asyncio
import itertools
import os
import signal
from dataclasses import replace

import pytest
import pytest_asyncio

from refrain.engines.inference.drafting.drafters import Drafters
from refrain.engines.rollout.moves import Race, Redraft, RolloutView
from refrain.schemas.counts import StreamCounts
from refrain.schemas.rollout import DraftSetting, RequestId, RolloutRequest
from tests.inference.pace import paced
from tests.inference.real import CONFIG, requests, roll_out, weights_of
from tests.inference.test_engine import drafts_of, history_of
from tests.sockets import assert_on_loopback, family

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]

WINDOW = 4
COUPLED = DraftSetting("small", WINDOW, coupled=True)
DECOUPLED = DraftSetting("small", WINDOW, coupled=False)
OWN_TEXT = DraftSetting("ngram", WINDOW)


NUM_PROMPTS = 32
"""Enough prompts for races to begin before responses end, on fast and on busy machines."""
MOST_ROLLOUTS = 10
ENOUGH = 50
"""Draft tokens that are enough to measure the acceptance rate."""


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def drafters(engines):
    """Start the drafters."""
    said: list[str] = []
    drafters = Drafters(CONFIG.engine.drafter_processes, engines[1:], said.append)
    await drafters.start()
    # Each engine and the drafter open a port of Ray and some of vLLM. The drafter opens one more.
    assert_on_loopback(family(), at_least=7)
    yield drafters, said
    await drafters.shutdown()


async def roll_out_drafted(
    engines, drafters, weights, assignments, policies=(), on_progress=None, **about
):
    """Run a stage. Return the rollouts by request id, the outcome, and the drafters' counts."""
    await drafters[0].take_counts()
    finished, outcome = await roll_out(
        engines, weights, assignments, policies, on_progress, **about
    )
    return finished, outcome, (await drafters[0].take_counts())["small"]


def drafted_requests(prompts, setting: DraftSetting | None) -> list[RolloutRequest]:
    return [replace(r, drafting=setting) for r in requests(prompts[:NUM_PROMPTS])]


def assert_as_without_drafts(finished, on_one_engine) -> None:
    assert len(finished) == 4 * NUM_PROMPTS
    for id, rollout in finished.items():
        expected = on_one_engine[id].generated
        assert rollout.generated.token_ids == expected.token_ids
        assert rollout.generated.inference_logprobs == pytest.approx(
            expected.inference_logprobs, abs=1e-4
        )


async def roll_out_until_drafted(engines, drafters, weights, todo, on_one_engine):
    """Repeat the stage until enough tokens were drafted. Return the generated tokens and counts.

    Engines do not wait for drafts, so a busy machine may need several rollouts.
    """
    counts = StreamCounts()
    for _ in range(MOST_ROLLOUTS):
        finished, outcome, of_one = await roll_out_drafted(engines, drafters, weights, todo)
        assert_as_without_drafts(finished, on_one_engine)
        counts.add(of_one)
        generated = [rollout.generated for rollout in finished.values()]
        if sum(one.num_draft_tokens for one in generated) >= ENOUGH:
            assert outcome.shares[1].drafting.num_drafting_steps
            return generated, counts
    raise AssertionError(f"too few drafts arrived in {MOST_ROLLOUTS} rollouts: {counts}")


@pytest.mark.parametrize("setting", [COUPLED, DECOUPLED, OWN_TEXT])
async def test_no_drafter_changes_a_token(
    engines, drafters, learner, prompts, on_one_engine, setting
):
    todo = [(1, request) for request in drafted_requests(prompts, setting)]
    weights = weights_of(learner, prompts)
    generated, counts = await roll_out_until_drafted(
        engines, drafters, weights, todo, on_one_engine
    )
    drafted = sum(g.num_draft_tokens for g in generated)
    accepted = sum(g.num_accepted_tokens for g in generated)
    if setting.drafter == "small":
        assert accepted > 0.5 * drafted
        assert counts.num_drafted >= drafted
        assert counts.num_failures
        bound = WINDOW if setting.coupled else 2 * WINDOW - 1
        assert counts.max_wasted <= bound


async def test_history_and_a_model_draft_in_one_verification(
    engines, drafters, learner, prompts, on_one_engine, history
):
    """Both together get more tokens accepted than either alone.

    Engines do not wait for the model, so this may take several rollouts.
    """
    weights = weights_of(learner, prompts)

    async def accepted(setting: DraftSetting | None) -> int:
        todo = [(1, request) for request in drafted_requests(prompts, setting)]
        finished, _, _ = await roll_out_drafted(engines, drafters, weights, todo)
        assert_as_without_drafts(finished, on_one_engine)
        return drafts_of(finished)[2]

    by_model = await accepted(DECOUPLED)
    await history_of(engines[0], learner, prompts[:NUM_PROMPTS], history)
    by_history = await accepted(None)
    for _ in range(MOST_ROLLOUTS):
        if (by_both := await accepted(DECOUPLED)) > max(by_model, by_history):
            break
    assert by_both > max(by_model, by_history) > 0


class RaceAll:
    """Policy that races each request of engine 0 on engine 1, once it has 8 tokens."""

    def __init__(self) -> None:
        self.raced: set[RequestId] = set()

    def decide(self, view: RolloutView) -> list[Race]:
        origin = next((e for e in view.engines if e.engine == 0), None)
        if origin is None or len(view.engines) < 2:
            return []
        new = [id for id, num in origin.progress.items() if num >= 8 and id not in self.raced]
        self.raced.update(new)
        return [Race(id, 1, DECOUPLED) for id in new]


async def test_a_race_changes_no_token(engines, drafters, learner, prompts, on_one_engine):
    todo = [(0, request) for request in drafted_requests(prompts, None)]
    finished, outcome, _ = await roll_out_drafted(
        engines,
        drafters,
        weights_of(learner, prompts),
        todo,
        [RaceAll()],
        moves_kv=lambda *_: True,
    )
    assert_as_without_drafts(finished, on_one_engine)
    assert outcome.moves.num_raced >= outcome.moves.num_raced_with_kv > 0
    assert outcome.moves.num_diverged == 0


class RedraftAll:
    """Policy that switches all requests between two draft settings at every decision.

    On a fast machine there are two decisions.
    """

    def __init__(self, there: DraftSetting, back: DraftSetting) -> None:
        self.settings = itertools.cycle((there, back))
        self.told: set[DraftSetting | None] = set()

    def decide(self, view: RolloutView) -> list[Redraft]:
        setting = next(self.settings)
        for engine in view.engines:
            self.told |= {progress.setting for progress in engine.drafting.values()}
        return [Redraft(id, one.engine, setting) for one in view.engines for id in one.progress]


async def test_redrafting_changes_no_token(engines, drafters, learner, prompts, on_one_engine):
    todo = [(1, request) for request in drafted_requests(prompts, COUPLED)]
    other, weights = DraftSetting("small", 2, coupled=False), weights_of(learner, prompts)
    policy = RedraftAll(other, COUPLED)
    async with paced(engines):
        finished, _, _ = await roll_out_drafted(engines, drafters, weights, todo, [policy])
    assert_as_without_drafts(finished, on_one_engine)
    assert other in policy.told


async def test_a_killed_drafter_changes_nothing(engines, drafters, learner, prompts, on_one_engine):
    fleet, said = drafters
    address = engines[1]._drafters["small"]
    pid = await fleet._drafters[0]._actor.handle.__ray_call__.remote(lambda _: os.getpid())
    killed = []

    def kill_once(view: RolloutView) -> None:
        if not killed and view.num_finished > 2:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    todo = [(1, request) for request in drafted_requests(prompts, COUPLED)]
    weights = weights_of(learner, prompts)
    finished, _ = await roll_out(engines, weights, todo, on_progress=kill_once)
    assert killed
    assert_as_without_drafts(finished, on_one_engine)
    async with asyncio.timeout(300):
        while engines[1]._drafters["small"] == address:
            await asyncio.sleep(0.5)
    assert any("died" in text for text in said)
    _, counts = await roll_out_until_drafted(engines, drafters, weights, todo, on_one_engine)
    assert counts.num_drafted
