"""An engine dies: its conversations get their answered turns back from the journal, all but those
of a conversation that has begun anew meanwhile."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refrain.benchmarks.timed_stubs import LocalStore
from refrain.engines.environment.actor import EnvironmentActor
from refrain.engines.environment.client import EnvironmentClient, TurnAnswer, answered
from refrain.engines.failures import Failures
from refrain.engines.inference.engine.conversations import (
    NOTHING,
    Conversations,
    TurnLimits,
    waits,
    with_turn,
)
from refrain.engines.inference.tool_parsers import open_parser
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.store.turns import by_sample
from refrain.flows.config_file import load_config
from refrain.schemas.environment import EnvironmentTask
from refrain.schemas.rollout import (
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    Split,
    VersionSpan,
)
from refrain.tasks.rollout import _recovered
from tests.conftest import REPOSITORY
from tests.rollout.fakes import FakeEngine, weights

TASK = EnvironmentTask("a", "mine", None, {}, 7)
SOURCE = '''
from pathlib import Path

class Counts:
    """Each conversation that begins gets another number."""

    def reset(self, task):
        number = Path(__file__).with_name("number")
        number.write_text((number.read_text() if number.exists() else "") + "x")
        self.number = len(number.read_text())

    def step(self, turn):
        with Path(__file__).with_name("calls").open("a") as file:
            file.write("x")
        return f"{self.number}"
'''


@dataclass
class Scene:
    """An actor with a journal, and an engine that draws whole turns."""

    actor: EnvironmentActor
    store: LocalStore
    run: Any

    async def converse(self, request: RolloutRequest, num_turns: int) -> RolloutRequest:
        """Return the request with so many more answered turns."""
        for _ in range(num_turns):
            generated = self.drawn(request.generated or NOTHING)
            answer = await self.actor.answer(request.id, TASK, generated)
            assert (answer.failed, answer.restarts) == (False, False)
            request = replace(request, generated=answered(generated, answer))
        return request

    def drawn(self, before: Generated) -> Generated:
        sampled = [*self.actor._tokenizer.encode("1"), self.actor._tokenizer.eos_token_id]
        num = before.num_sampled + len(sampled)
        tokens = [*before.token_ids, *sampled]
        spans = (VersionSpan(0, num),)
        return with_turn(
            replace(before, token_ids=tokens, inference_logprobs=[-0.5] * num, spans=spans)
        )

    async def recovered(self, *requests: RolloutRequest) -> Sequence[RolloutRequest]:
        return await asyncio.wait_for(_recovered(self.run, 0, requests), 10)


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "mine.py").write_text(SOURCE)
    config = load_config(
        REPOSITORY / "infra" / "demo_tools" / "train.yaml",
        (f"environment.path={tmp_path / 'mine.py'}", "environment.processes=1"),
    )
    store = LocalStore(tmp_path / "run.duckdb")
    actor = EnvironmentActor(config, open_parser, lambda: store)

    async def written(_: EnvironmentClient, ids: Iterable[RequestId]) -> set[str]:
        return set(await actor.written([str(id.origin) for id in ids]))

    monkeypatch.setattr(EnvironmentClient, "written", written)
    run = SimpleNamespace(
        inputs=SimpleNamespace(environment=SimpleNamespace(goes_on=True)),
        config=config,
        failures=Failures(tmp_path),
        store=store.call,
    )
    yield Scene(actor, store, run)
    await actor.shutdown()
    store._store.close()


def request_of(sample: int) -> RolloutRequest:
    return RolloutRequest(RequestId(Split.TRAIN, 1, "a", sample), (1, 2), 0, 10_000, task=TASK)


async def test_all_answered_turns_come_back(scene: Scene) -> None:
    await scene.actor.start()
    assert scene.actor._journal
    scene.actor._journal._pause_s = 2.0
    had = [await scene.converse(request_of(sample), sample) for sample in range(4)]
    assert by_sample(scene.store._store.open_turns()) == {}
    for before, now in zip(had, await scene.recovered(*map(request_of, range(4))), strict=True):
        if before.generated is None:
            assert now.generated is None
            continue
        assert now.generated is not None
        # The last answer is asked for again, and the actor has it.
        answer = await scene.actor.answer(now.id, TASK, now.generated)
        again = answered(now.generated, answer)
        assert list(again.token_ids) == list(before.generated.token_ids)
        assert [turn.num_tokens for turn in again.turns] == [
            turn.num_tokens for turn in before.generated.turns
        ]
        assert all(turn.ended_s for turn in now.generated.turns)
    assert (Path(scene.run.config.environment.path).with_name("number")).read_text() == "xxx"


async def test_others_that_go_on_do_not_hold_it_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the journal gets another turn during each write, so its writing never ends."""
    call = scene.store.call

    async def as_long_as_a_turn(method: str, *args: Any) -> Any:
        while method == "add_turns" and not (scene.actor._journal and scene.actor._journal._noted):
            await asyncio.sleep(0.001)
        return await call(method, *args)

    async def go_on() -> None:
        for sample in range(1, 10_000):
            await scene.converse(request_of(sample), 2)

    monkeypatch.setattr(scene.store, "call", as_long_as_a_turn)
    await scene.actor.start()
    going_on = asyncio.create_task(go_on())
    await scene.converse(request_of(0), 2)
    (now,) = await scene.recovered(request_of(0))
    assert now.generated is not None
    assert len(now.generated.turns) == 2
    assert not going_on.done()
    monkeypatch.setattr(scene.store, "call", call)
    going_on.cancel()


async def test_a_request_keeps_its_own_tokens_if_it_has_more(scene: Scene) -> None:
    had = await scene.converse(request_of(0), 2)
    own = scene.drawn(had.generated or NOTHING)
    (now,) = await scene.recovered(replace(had, generated=own))
    assert now.generated is own


async def test_a_conversation_that_begins_anew_gets_no_turns_of_before(scene: Scene) -> None:
    """They would only make it begin anew once more, which counts as a retry."""
    had = await scene.converse(request_of(0), 2)
    await scene.recovered(request_of(0))
    assert len(by_sample(scene.store._store.open_turns())) == 1
    await scene.actor._pool.forget([str(had.id)])
    assert (await scene.actor.answer(had.id, TASK, scene.drawn(had.generated or NOTHING))).restarts
    (now,) = await scene.recovered(request_of(0))
    assert now.generated is None


async def test_an_actor_that_does_not_answer_leaves_the_requests_as_they_came(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, record_failures: list
) -> None:
    async def hangs(*_: Any) -> set[str]:
        raise TimeoutError("it hangs")

    await scene.converse(request_of(0), 2)
    monkeypatch.setattr(EnvironmentClient, "written", hangs)
    (now,) = await scene.recovered(request_of(0))
    assert now.generated is None
    assert len(record_failures) == 1
    record_failures.clear()


NUM_CONVERSATIONS, MAX_TURNS, TURN_TOKENS = 8, 5, 12


class TalkingEngine(FakeEngine):
    """An engine whose turns have `TURN_TOKENS` tokens, one a tick. The actor answers them."""

    def __init__(self, index: int, scene: Scene) -> None:
        super().__init__(index)
        self._eos, self._actor = scene.actor._tokenizer.eos_token_id, scene.actor
        self.num_drawn = 0
        self.came: dict[RequestId, int] = {}
        """Turns that each request brought along."""
        self.talking = Conversations(
            self, TurnLimits(MAX_TURNS), self._go_on, self._finish, self._fail
        )

    async def answer(self, request: RolloutRequest) -> TurnAnswer:
        assert request.generated
        return await self._actor.answer(request.origin, TASK, request.generated)

    async def end(self, request: RolloutRequest, reason: FinishReason) -> TurnAnswer:
        assert request.generated
        return await self._actor.end(request.origin, TASK, request.generated, str(reason))

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._call("submit")
        for request in requests:
            self.came[request.id] = len(request.generated.turns) if request.generated else 0
            if waits(request.generated):
                self.talking.ask(request)
            else:
                await self._go_on(request)

    def die(self) -> None:
        super().die()
        for id in self.came:
            self.talking.withdraw(id)

    def num_turns(self, id: RequestId) -> int:
        """Return how many turns of a conversation have an answer here."""
        request = self.talking.waiting(id) or self.running.get(id, (None,))[0]
        generated = request and request.generated
        return sum(turn.num_observed is not None for turn in generated.turns) if generated else 0

    def is_within_turn_3(self, id: RequestId) -> bool:
        _, tokens = self.running.get(id, (None, ()))
        return bool(tokens) and self.num_turns(id) == 2

    async def _go_on(self, request: RolloutRequest) -> None:
        self.running[request.id] = request, []

    def _grow(self, id: RequestId) -> None:
        request, tokens = self.running[id]
        tokens.append(self._eos if len(tokens) == TURN_TOKENS - 1 else 5)
        self.num_drawn += 1
        if len(tokens) < TURN_TOKENS:
            return
        del self.running[id]
        before = request.generated or NOTHING
        num = before.num_sampled + TURN_TOKENS
        generated = replace(
            before,
            token_ids=[*before.token_ids, *tokens],
            inference_logprobs=[-0.5] * num,
            spans=(VersionSpan(0, num),),
        )
        self.talking.turn_ended(replace(request, generated=generated), FinishReason.STOP)

    def _finish(self, request: RolloutRequest, reason: FinishReason) -> None:
        assert request.generated
        self.finished.append(Rollout(request, request.generated, reason, self.index, 0.0, 1.0))

    def _fail(self, error: BaseException) -> None:
        raise error


async def test_an_engine_that_dies_in_turn_3_costs_one_turn_of_a_conversation_at_most(
    scene: Scene,
) -> None:
    await scene.actor.start()
    engines = [TalkingEngine(index, scene) for index in range(2)]
    coordinator, finished = Coordinator(engines), list[Any]()
    todo = [(number % 2, request_of(number)) for number in range(NUM_CONVERSATIONS)]
    theirs = [request.id for engine, request in todo if engine == 1]

    async def keep(rollouts: Sequence[Any]) -> None:
        finished.extend(rollouts)

    async def in_turn_3() -> dict[RequestId, int]:
        while not any(engines[1].is_within_turn_3(id) for id in theirs):
            await asyncio.sleep(0.001)
        had = {id: engines[1].num_turns(id) for id in theirs}
        engines[1].die()
        return had

    await coordinator.start()
    stage = coordinator.roll_out(
        todo, keep, weights=weights(), recover=lambda own: _recovered(scene.run, 0, own)
    )
    had = await asyncio.wait_for(in_turn_3(), 30)
    engines[0].came.clear()
    await asyncio.wait_for(stage, 30)
    await coordinator.shutdown()
    assert {rollout.id: len(rollout.generated.turns) for rollout in finished} == {
        request.id: MAX_TURNS for _, request in todo
    }
    calls = Path(scene.run.config.environment.path).with_name("calls").read_text()
    assert len(calls) == NUM_CONVERSATIONS * MAX_TURNS
    came = {id: engines[0].came[id] for id in theirs}
    assert all(came[id] >= had[id] for id in theirs), (had, came)
    num_again = sum(engine.num_drawn for engine in engines) - sum(
        rollout.generated.num_sampled for rollout in finished
    )
    assert 0 < num_again <= len(theirs) * TURN_TOKENS
