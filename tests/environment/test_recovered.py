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
from refrain.engines.environment.client import EnvironmentClient, answered
from refrain.engines.failures import Failures
from refrain.engines.inference.engine.conversations import NOTHING, with_turn
from refrain.engines.inference.tool_parsers import open_parser
from refrain.engines.store.turns import by_sample
from refrain.flows.config_file import load_config
from refrain.schemas.environment import EnvironmentTask
from refrain.schemas.rollout import Generated, RequestId, RolloutRequest, Split, VersionSpan
from refrain.tasks.rollout import _recovered
from tests.conftest import REPOSITORY

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
