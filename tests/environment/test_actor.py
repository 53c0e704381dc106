"""The actor that answers turns: a conversation that began anew is not mixed with the one before."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from refrain.benchmarks.timed_stubs import LocalStore
from refrain.engines.environment.actor import EnvironmentActor
from refrain.engines.environment.client import TurnAnswer
from refrain.engines.inference.tool_parsers import open_parser
from refrain.engines.store.actor import StoreClient
from refrain.engines.store.turns import by_sample
from refrain.schemas.config import TrainConfig
from refrain.schemas.environment import EnvironmentTask
from refrain.schemas.rollout import Generated, RequestId, Split, Turn
from tests.conftest import DEMO

ID = RequestId(Split.TRAIN, 1, "a", 0)
TASK = EnvironmentTask("a", "mine", None, {}, 7)
UNSTABLE = """
from pathlib import Path

class Unstable:
    def __init__(self, note):
        self.note = Path(note)

    def reset(self, task):
        self.note.write_text(self.note.read_text() + "x")
        self.number = len(self.note.read_text()) * 11

    def step(self, turn):
        return f"{self.number}"

    def end(self, reason):
        raise OSError("it cannot end")
"""


def run(
    directory: Path,
    steps: Callable[[Any], Any],
    store: StoreClient | None = None,
    *,
    retries: int = 3,
    source: str = UNSTABLE,
) -> Any:
    """Run `steps` with a function that makes actors of one unstable environment."""
    (directory / "mine.py").write_text(source)
    (directory / "note").write_text("")
    environment = {"path": str(directory / "mine.py"), "kwargs": {"note": str(directory / "note")}}
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(DEMO / "model")},
            "data": {"train": ["unused"]},
            "environment": environment | {"processes": 1, "retries": retries},
        }
    )
    actors: list[EnvironmentActor] = []

    def make() -> EnvironmentActor:
        actors.append(EnvironmentActor(config, open_parser, store and (lambda: store)))
        return actors[-1]

    async def go() -> Any:
        try:
            return await steps(make)
        finally:
            for actor in actors:
                await actor.shutdown()

    return asyncio.run(go())


def said(
    actor: EnvironmentActor, *sampled: str, observed: Sequence[Sequence[int]] = ()
) -> Generated:
    """Return a conversation with these turns, and the answers to all but the last."""
    tokens: list[int] = []
    turns: list[Turn] = []
    for at, text in enumerate(sampled):
        own = [*actor._tokenizer.encode(text), actor._tokenizer.eos_token_id]
        answer = list(observed[at]) if at < len(observed) else None
        tokens += [*own, *(answer or ())]
        turns.append(Turn(len(own), None if answer is None else len(answer)))
    return Generated(tokens, [], (), turns=tuple(turns))


async def ask(actor: EnvironmentActor, talk: Generated) -> TurnAnswer:
    return await actor.answer(ID, TASK, talk)


async def tokens_of(actor: EnvironmentActor, talk: Generated) -> Sequence[int]:
    answer = await ask(actor, talk)
    assert answer.observed is not None
    return answer.observed


def test_a_conversation_before_the_restart_begins_anew_too(tmp_path: Path) -> None:
    """An engine that died may leave it to another one, while the actor knows the later one."""

    async def steps(make: Any) -> None:
        before, actor = make(), make()
        old = await tokens_of(before, said(before, "1"))
        new = await tokens_of(actor, said(actor, "1"))
        assert old != new
        assert (await ask(actor, said(actor, "1", "2", observed=[new]))).observed is not None
        assert (await ask(actor, said(actor, "1", "2", observed=[old]))).restarts
        again = await tokens_of(actor, said(actor, "1"))
        assert again not in (old, new)
        assert (await ask(actor, said(actor, "1", "2", observed=[again]))).observed is not None

    run(tmp_path, steps)


def test_an_answer_belongs_to_the_tokens_of_its_turn(tmp_path: Path) -> None:
    async def steps(make: Any) -> None:
        actor = make()
        first = await tokens_of(actor, said(actor, "1"))
        assert await tokens_of(actor, said(actor, "1")) == first
        assert (tmp_path / "note").read_text() == "x"
        other = await tokens_of(actor, said(actor, "2"))
        assert other != first
        assert (tmp_path / "note").read_text() == "xx"

    run(tmp_path, steps)


def test_an_environment_that_cannot_end_a_conversation_has_failed(tmp_path: Path) -> None:
    async def steps(make: Any) -> None:
        actor = make()
        answer = await actor.end(ID, TASK, said(actor, "1"), "turns")
        assert (answer.failed, answer.score) == (True, None)
        assert "it cannot end" in (await actor.failures())[str(ID)]

    run(tmp_path, steps)


@pytest.mark.parametrize("replays", [True, False])
def test_a_recorded_conversation_that_cannot_go_on_begins_anew(
    tmp_path: Path, *, replays: bool
) -> None:
    """Without a retry: the user may have changed the environment before --resume."""

    async def steps(make: Any) -> None:
        before = make()
        first = await tokens_of(before, said(before, "1"))
        await before.shutdown()
        recorded = by_sample(await store.call("open_turns"))
        assert [len(turns) for turns in recorded.values()] == ([1] if replays else [])
        actor = make()
        if replays:
            assert await tokens_of(actor, said(actor, "1")) == first
            assert (await ask(actor, said(actor, "1", "2", observed=[first]))).restarts
        assert await tokens_of(actor, said(actor, "1")) != first

    store = LocalStore(tmp_path / "run.duckdb")
    source = UNSTABLE.replace("def __init__", f"replays = {replays}\n\n    def __init__", 1)
    run(tmp_path, steps, store, retries=0, source=source)
