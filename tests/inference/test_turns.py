"""Conversations on real engines, with an environment in a worker process: no move, death, draft or
order changes a token, and each turn is what an engine without environments samples there."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import pytest_asyncio
import ray

from refrain.benchmarks.one_step import fetch
from refrain.engines.actors import RemoteActor
from refrain.engines.environment.actor import EnvironmentActor, split_turns
from refrain.engines.environment.client import EnvironmentClient, name_of
from refrain.engines.histospec.library import IndexLibrary
from refrain.engines.histospec.worker import histories as indexed
from refrain.engines.inference.engine.conversations import waits
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.inference.tool_parsers import open_parser
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.moves import Defer, EngineView, Migrate, Move, Race, RolloutView
from refrain.engines.store.rows import rollout_rows
from refrain.schemas.drafting import NGRAM, DraftingConfig
from refrain.schemas.environment import EnvironmentConfig, EnvironmentTask
from refrain.schemas.rollout import (
    DraftSetting,
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    VersionSpan,
)
from tests.inference.pace import PacedEngine, paced, set_pace
from tests.inference.real import CONFIG, requests, roll_out, weights_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]

SOURCE = '''
import random, time

class Sums:
    """Asks for another sum until a random number of turns is over."""
    def reset(self, task):
        self.random = random.Random(task.seed)
        self.left = self.random.randint(0, 3)
    def step(self, turn):
        time.sleep(0.8)
        if self.left == 0:
            return (len(turn.text) % 11) / 10
        self.left -= 1
        return f"{self.random.randint(1, 99)}+{self.random.randint(1, 99)}=?"
    def end(self, reason):
        return -1.0
'''
MAX_TURNS = 3
SLOTS = 8
"""Conversations that an engine generates at the same time."""
DRAFTS, RACED = DraftSetting(NGRAM, 4), DraftSetting(NGRAM, 3)


class CountingEngine(RayEngine):
    """An engine that counts the conversations that come to it after their beginning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_came: Counter[tuple[str, bool]] = Counter()
        """Number of conversations by the reason, and whether they wait for an answer."""

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self.num_came.update((reason(r), waits(r.generated)) for r in requests if r.generated)
        await super().submit(requests)


def reason(request: RolloutRequest) -> str:
    """Return why a request comes to an engine after its beginning."""
    if request.deferred_from is not None:
        return "deferred"
    return "raced" if request.drafting == RACED else "moved"


@pytest.fixture(scope="module")
def histories(tmp_path_factory) -> Path:
    """Return the directory of the indexes, which is empty at first."""
    return tmp_path_factory.mktemp("histories")


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def conversing(ray_cluster, histories, tmp_path_factory):
    """Two engines with the same environment."""
    assert ray_cluster.is_initialized()
    path: Path = tmp_path_factory.mktemp("environment") / "sums.py"
    path.write_text(SOURCE)
    environment = EnvironmentConfig(path=path, max_turns=MAX_TURNS, retries=2)
    rollout = CONFIG.rollout.model_copy(update={"max_num_seqs": SLOTS})
    config = CONFIG.model_copy(update={"environment": environment, "rollout": rollout})
    actor = RemoteActor(
        "environments",
        EnvironmentActor,
        config,
        open_parser,
        found_by=name_of(0, 1),
        max_concurrency=1000,
        max_restarts=3,
        max_task_retries=3,
    )
    await actor.call("start", timeout_s=120.0)
    settings = config.engine.model_copy(update={"races_with_kv": False, "history_dir": histories})
    engines = [CountingEngine(10 + i, settings, 0, engine_class=PacedEngine) for i in range(2)]
    await asyncio.gather(*(engine.start() for engine in engines))
    for index, engine in enumerate(engines):
        engine.index = index
    yield engines
    for engine in engines:
        await engine.shutdown()
    await actor.stop()


@pytest.fixture(scope="module", params=[24, pytest.param(256, marks=pytest.mark.slow)])
def conversations(request, prompts) -> list[RolloutRequest]:
    """Return so many requests. All samples of a prompt have the same environment."""
    return [
        replace(one, task=EnvironmentTask(one.id.prompt_key, "sums", "", {}, seed=number // 4))
        for number, one in enumerate(requests((2 * prompts)[: request.param // 4]))
    ]


Conversation = tuple[list[int], Any, float | None, FinishReason]


def said(finished: dict[RequestId, Rollout]) -> dict[RequestId, Conversation]:
    """Return tokens, turns, score and end of each conversation."""
    return {
        id: (
            list(rollout.generated.token_ids),
            [(turn.num_sampled, turn.num_observed) for turn in rollout.generated.turns],
            rollout.generated.score,
            rollout.finish_reason,
        )
        for id, rollout in finished.items()
    }


async def converse(engines, weights, assignments, *args, **options) -> dict[RequestId, Rollout]:
    """Return the conversations. Their environments then forget all turns, so that conversations
    with the same ids wait for their answers again."""
    finished, _ = await roll_out(engines, weights, assignments, *args, **options)
    assert len(finished) == len(assignments)
    await forget(engines, finished)
    return finished


async def forget(engines, ids: Iterable[RequestId]) -> None:
    environment = engines[0]._config.environment
    await EnvironmentClient(environment).finished(list(ids))


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def alone(conversing, conversations, learner, prompts) -> dict[RequestId, Rollout]:
    """Return the conversations on one engine, without drafts."""
    todo = [(0, request) for request in conversations]
    return await converse(conversing[:1], weights_of(learner, prompts), todo)


async def test_each_turn_is_what_an_engine_without_environments_samples(
    alone, conversations, engines, learner, prompts
) -> None:
    todo, expected = [], {}
    given = {request.id: request for request in conversations}
    for number, rollout in enumerate(list(alone.values())[::4]):
        of, before = rollout.generated, 0
        parts = split_turns(of.token_ids, of.turns)
        for turn, (sampled, observed) in enumerate(parts):
            id = RequestId(rollout.id.split, 1, rollout.id.prompt_key, 100 * number + turn)
            spans = (VersionSpan(0, before),)
            begun = Generated(of.token_ids[:before], [0.0] * before, spans) if before else None
            todo.append(replace(given[rollout.id], id=id, task=None, generated=begun))
            expected[id] = list(of.token_ids[: before + len(sampled)])
            before += len(sampled) + len(observed)
    finished, _ = await roll_out(
        engines[:1], weights_of(learner, prompts), [(0, request) for request in todo]
    )
    assert {id: list(rollout.generated.token_ids) for id, rollout in finished.items()} == expected


async def test_conversations_have_turns_of_all_kinds(alone) -> None:
    """Else the tests here would show little."""
    reasons = {rollout.finish_reason for rollout in alone.values()}
    assert {FinishReason.STOP, FinishReason.TURNS} <= reasons
    assert {len(rollout.generated.turns) for rollout in alone.values()} == set(range(1, 4))
    for rollout in alone.values():
        cut = rollout.finish_reason is not FinishReason.STOP
        assert (rollout.generated.score == -1.0) == cut
        assert rollout.num_cached_tokens >= 0


class Restless:
    """Moves, races and defers conversations, in a turn and while they wait for their answer."""

    def __init__(self) -> None:
        self._seen: dict[RequestId, int] = {}
        self._kinds = {still: cycle([Migrate, Race, Defer]) for still in (True, False)}

    def decide(self, view: RolloutView) -> list[Move]:
        moves = [move for engine in view.engines for move in self._moves(engine)]
        self._seen = {id: num for engine in view.engines for id, num in engine.progress.items()}
        return moves

    def _moves(self, engine: EngineView) -> Iterator[Move]:
        """Yield a move of a conversation that has gained tokens, and of one that has not."""
        progress, other = engine.progress, 1 - engine.engine
        for still, kinds in self._kinds.items():
            ids = [id for id in progress if (self._seen.get(id) == progress[id]) == still]
            if ids:
                id, kind = ids[len(self._seen) % len(ids)], next(kinds)
                yield Race(id, other, RACED) if kind is Race else kind(id, other)


async def test_no_move_or_draft_changes_a_conversation(
    alone, conversing, conversations, learner, prompts
) -> None:
    """Two engines get them in another order, in two steps. The second step also has those that the
    first one defers."""
    weights, told = weights_of(learner, prompts), []
    todo = [replace(request, drafting=DRAFTS) for request in conversations[::-1]]
    first = todo[len(todo) // 3 :]
    second = [replace(r, id=replace(r.id, step=2)) for r in todo[: len(todo) // 3]]
    coordinator = Coordinator(conversing, [Restless()])
    await coordinator.load_weights(weights)

    async def keep(rollouts):
        told.extend(rollouts)

    async with asyncio.timeout(300), paced(conversing):
        stages = [
            coordinator.roll_out([(at % 2, r) for at, r in enumerate(part)], keep, min_rollouts=0)
            for part in (first, second)
        ]
        await asyncio.gather(*stages)
    finished = {replace(rollout.id.origin, step=1): rollout for rollout in await fetch(told)}
    await forget(conversing, [rollout.id.origin for rollout in told])
    num_came = sum((engine.num_came for engine in conversing), Counter())
    kinds = {(why, waiting) for why in ("moved", "raced", "deferred") for waiting in (True, False)}
    assert num_came.keys() >= kinds, num_came
    assert said(finished) == said(alone)
    assert sum(rollout.generated.num_draft_tokens for rollout in finished.values()) > 100


def index_conversations(rollouts: Iterable[Rollout], directory: Path) -> None:
    rows = rollout_rows(list(rollouts))
    rows = rows.append_column("reward", pa.array([1.0] * len(rows))).sort_by("prompt_key")
    IndexLibrary(directory, DraftingConfig()).add(indexed(rows))


async def test_drafts_from_history_change_no_conversation_and_know_later_turns(
    alone, conversing, conversations, histories, learner, prompts
) -> None:
    """The same conversations again, as an epoch later with the same policy and noise."""
    index_conversations(alone.values(), histories)
    todo = [(0, request) for request in conversations]
    finished = await converse(conversing[:1], weights_of(learner, prompts), todo)
    for path in histories.glob("*.index"):
        path.unlink()
    assert said(finished) == said(alone)
    turns = [turn for rollout in finished.values() for turn in rollout.generated.turns[1:]]
    num_drafted = sum(turn.num_draft_tokens for turn in turns)
    assert num_drafted > 100
    # A turn's own text is in the history, but so are those of other samples.
    assert sum(turn.num_accepted_tokens for turn in turns) > 0.6 * num_drafted
    whole = [rollout.generated for rollout in finished.values()]
    first = [rollout.generated.turns[0] for rollout in finished.values()]
    assert sum(turn.num_draft_tokens for turn in (*first, *turns)) == sum(
        of.num_draft_tokens for of in whole
    )


async def test_an_environment_actor_that_dies_changes_no_conversation(
    alone, conversing, conversations, learner, prompts
) -> None:
    """It is restarted without the answers so far, and replays the turns."""
    todo = [(number % 2, request) for number, request in enumerate(conversations)]
    killed = False

    def kill(view: RolloutView) -> None:
        nonlocal killed
        if not killed and view.num_finished > len(todo) // 8:
            killed = True
            ray.kill(ray.get_actor(name_of(0, 1)), no_restart=False)

    finished = await converse(conversing, weights_of(learner, prompts), todo, on_progress=kill)
    assert killed
    assert said(finished) == said(alone)


async def test_no_death_changes_a_conversation(
    alone, conversing, conversations, learner, prompts
) -> None:
    """The engine dies with conversations in a turn, and with others that wait for their answer."""
    todo = [(number % 2, request) for number, request in enumerate(conversations)]
    killed = False

    def kill(view: RolloutView) -> None:
        nonlocal killed
        here = [id for engine in view.engines if engine.engine == 1 for id in engine.progress]
        if killed or view.num_finished <= len(todo) // 8 or not here:
            return
        copies = ray.get(conversing[1].actor.copy.remote(here), timeout=60)
        if {waits(copy.generated) for copy in copies} == {True, False}:
            killed = True
            conversing[1].actor.__ray_terminate__.remote()

    await set_pace(conversing[1], 0.05)
    finished = await converse(conversing, weights_of(learner, prompts), todo, on_progress=kill)
    assert killed
    assert said(finished) == said(alone)
