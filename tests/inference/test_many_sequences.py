"""16,384 sequences with every drafter of an engine, moved and after a death: no token changes."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.rollout.moves import Migrate, RolloutView
from refrain.schemas.drafting import HEAD, NGRAM
from refrain.schemas.rollout import DraftSetting, RequestId
from tests.inference.pace import dial
from tests.inference.real import requests, roll_out, tokens_of, weights_of
from tests.inference.test_engine import drafts_of, history_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.asyncio(loop_scope="package"),
]

GROUP_SIZE = 512
SETTINGS = (None, DraftSetting(HEAD, 4), DraftSetting(NGRAM, 4))
TIMEOUT_S = 1500.0


class MoveSomeAndKill:
    """Moves one request in 4 that it sees early to the other drafting engine. Kills a process
    after 100."""

    def __init__(self, pid: int) -> None:
        self.moved: set[RequestId] = set()
        self.killed = False
        self._pid = pid

    def decide(self, view: RolloutView) -> list[Migrate]:
        moves = [
            Migrate(id, 3 - engine.engine)
            for engine in view.engines
            for id, num_tokens in engine.progress.items()
            if num_tokens >= 4 and id.sample_index % 4 == 0 and id not in self.moved
        ]
        self.moved |= {move.id for move in moves}
        if len(self.moved) >= 100 and not self.killed:
            os.kill(self._pid, signal.SIGKILL)
            self.killed = True
        return moves


async def test_no_drafter_move_or_death_changes_one_of_many_tokens(
    engines: list[RayEngine], tp2: RayEngine, learner, prompts, history: Path
) -> None:
    """Engine 0 never drafts, and gives the reference. Negative control: another key."""
    weights = weights_of(learner, prompts)
    todo = requests(prompts, group_size=GROUP_SIZE)
    assert len(todo) == 16_384
    finished, _ = await roll_out(
        engines[:1], weights, [(0, one) for one in todo], timeout_s=TIMEOUT_S
    )
    expected = tokens_of(finished)
    await history_of(engines[0], learner, prompts, history)
    all_engines = [*engines, tp2]
    await dial(all_engines, 1.0)
    mixed = [
        (1 + i % 2, replace(one, drafting=SETTINGS[i % len(SETTINGS)]))
        for i, one in enumerate(todo)
    ]
    policy = MoveSomeAndKill(
        await engines[1]._actor.handle.__ray_call__.remote(lambda _: os.getpid())
    )
    finished, outcome = await roll_out(all_engines, weights, mixed, [policy], timeout_s=TIMEOUT_S)
    await dial(all_engines, 1.0, gate=True)
    assert policy.killed
    assert outcome.moves.num_migrated > 50
    assert outcome.shares[1].num_restarts == 1
    _, num_drafted, num_accepted = drafts_of(finished)
    assert num_drafted > num_accepted > 100_000
    assert tokens_of(finished) == expected
    others, _ = await roll_out(
        engines[:1], weights, [(0, one) for one in requests(prompts, seed=2)]
    )
    assert any(one.generated.token_ids != expected[id] for id, one in others.items())
