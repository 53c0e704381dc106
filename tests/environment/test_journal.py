"""The journal: a driver that dies redraws one turn of a conversation at most, and repeats no call
whose result a later turn has seen."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.benchmarks.timed_stubs import LocalStore
from refrain.engines.environment import journal
from refrain.engines.environment.actor import EnvironmentActor
from refrain.engines.environment.client import answered
from refrain.engines.environment.journal import joined_parts, parts_of
from refrain.engines.inference.engine.conversations import NOTHING, waits, with_turn
from refrain.engines.inference.tool_parsers import open_parser
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store
from refrain.engines.store.turns import by_sample
from refrain.flows.config_file import load_config
from refrain.schemas.config import TrainConfig
from refrain.schemas.environment import EnvironmentTask
from refrain.schemas.rollout import (
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    Split,
    Turn,
    VersionSpan,
)
from refrain.tasks.rollout import _continued
from tests.conftest import REPOSITORY

TASK = EnvironmentTask("a", "mine", None, {}, 7)
TICK = '''
from pathlib import Path

def tick() -> int:
    """Number of this call: each has another one."""
    ticks = Path(__file__).with_name("ticks")
    with ticks.open("a") as file:
        file.write("x")
        return file.tell()

tools = [tick]
'''
CALL, END = '<tool_call>{"name": "tick", "arguments": {}}</tool_call>', "#### 1"
NUM_CALLS, NUM_SAMPLES = 3, 4
turns = st.lists(st.builds(Turn, st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5)


@given(turns=turns, cuts=st.sets(st.integers(1, 20)))
def test_the_parts_of_a_response_make_it_up(turns: list[Turn], cuts: set[int]) -> None:
    num_sampled = sum(turn.num_sampled for turn in turns)
    ends = [0, *sorted(cut for cut in cuts if cut < num_sampled), num_sampled]
    spans = [
        VersionSpan(version, end - begin) for version, (begin, end) in enumerate(pairwise(ends))
    ]
    num_tokens = sum(turn.num_tokens for turn in turns)
    whole = Generated(
        list(range(num_tokens)),
        [-0.25 * at for at in range(num_sampled)],
        tuple(spans),
        num_draft_tokens=5,
        turns=tuple(turns),
    )
    parts = parts_of(whole)
    assert all(len(part.inference_logprobs) == part.turns[0].num_sampled for part in parts)
    assert all(part.num_sampled == sum(s.num_tokens for s in part.spans) for part in parts)
    made = joined_parts(parts)
    as_lists = {
        "token_ids": list(made.token_ids),
        "inference_logprobs": list(made.inference_logprobs),
    }
    assert replace(made, **as_lists) == whole


class Killed(Exception):
    """The driver's end."""


@dataclass
class Driver:
    """A driver, its actor and an engine that draws whole turns, from a start to a death."""

    config: TrainConfig
    path: Path
    num_left: int
    """Events until its death."""

    def __post_init__(self) -> None:
        self.client = LocalStore(self.path)
        self.store = self.client._store
        self.actor = EnvironmentActor(self.config, open_parser, lambda: self.client)
        self.drawn: Counter[tuple[RequestId, int]] = Counter()
        """Turns that were drawn, by sample and number."""

    async def run(self) -> bool:
        """Return whether all conversations have finished before the death."""
        recorded = by_sample(self.store.open_turns(Split.TRAIN, 1))
        done = self.store.finished_ids(Split.TRAIN, 1, [0])
        requests = [_request(i) for i in range(NUM_SAMPLES)]
        talks = [
            asyncio.create_task(
                self._converse(_continued(each, recorded.get(each.id, ()), 0, mixes=False))
            )
            for each in requests
            if each.id not in done
        ]
        try:
            await asyncio.gather(*talks)
            await self.actor.shutdown()
            return True
        except Killed:
            with self.store._writing:
                for file in self.path.parent.glob(f"{self.path.name}*"):
                    shutil.copy(file, self.path.with_name(f"next-{file.name}"))
            for talk in talks:
                talk.cancel()
            await asyncio.wait(talks)
            await self.actor.shutdown()
            return False
        finally:
            self.store.close()

    def _event(self) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise Killed

    async def _converse(self, request: RolloutRequest) -> None:
        generated = request.generated or NOTHING
        while True:
            if not waits(generated):
                generated = await self._drawn(request.id, generated)
            self._event()
            answer = await self.actor.answer(request.id, TASK, generated)
            self._event()
            assert (answer.failed, answer.restarts) == (False, False)
            generated = answered(generated, answer)
            if answer.observed is None:
                rollout = Rollout(request, generated, FinishReason.STOP, 0, 1.0, 2.0)
                await self.client.call("add_rollouts", rollout_rows([rollout]), 0)
                return

    async def _drawn(self, id: RequestId, before: Generated) -> Generated:
        """Return the tokens with the next turn, which takes as long as a write of the journal."""
        number = len(before.turns)
        assert self.actor._journal
        await self.actor._journal.close()
        self.drawn[id, number] += 1
        tokenizer = self.actor._tokenizer
        text = CALL if number < NUM_CALLS else END
        sampled = [*tokenizer.encode(f"{id.sample_index}{text}"), tokenizer.eos_token_id]
        num_sampled = before.num_sampled + len(sampled)
        return with_turn(
            replace(
                before,
                token_ids=[*before.token_ids, *sampled],
                inference_logprobs=[-0.5] * num_sampled,
                spans=(VersionSpan(0, num_sampled),),
            )
        )


def _request(sample: int) -> RolloutRequest:
    return RolloutRequest(RequestId(Split.TRAIN, 1, "a", sample), (1, 2), 0, 1000)


def _config(directory: Path, source: str, *overrides: str) -> TrainConfig:
    path = directory / "mine.py"
    path.write_text(source)
    given = (f"environment.path={path}", "environment.processes=1", *overrides)
    return load_config(REPOSITORY / "infra" / "demo_tools" / "train.yaml", given)


@pytest.mark.parametrize("deaths", [(12, 13), (21, 6)])
async def test_a_killed_driver_redraws_one_turn_at_most(
    deaths: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(journal, "WRITE_EVERY_S", 0.001)
    monkeypatch.setattr(journal, "MAX_SHARE", 1.0)
    config, drivers = _config(tmp_path, TICK), []
    path, num_events = tmp_path / "run.duckdb", 2 * NUM_SAMPLES * (NUM_CALLS + 1)
    for num_left in (*deaths, num_events):
        drivers.append(Driver(config, path, num_left))
        ended = await drivers[-1].run()
        assert ended == (num_left == num_events)
        path = path.with_name(f"next-{path.name}") if not ended else path
    before: set[tuple[RequestId, int]] = set()
    for driver in drivers:
        redrawn = Counter(id for id, number in driver.drawn if (id, number) in before)
        assert max(driver.drawn.values(), default=0) <= 1
        assert max(redrawn.values(), default=0) <= 1
        before |= driver.drawn.keys()
    with Store(path) as store:
        rows = store.rollouts(Split.TRAIN, 1).to_pylist()
        assert by_sample(store.open_turns()) == {}
    assert [len(row["turns"]) for row in rows] == [NUM_CALLS + 1] * NUM_SAMPLES
    num_ticks = len((tmp_path / "ticks").read_text())
    assert num_ticks <= NUM_SAMPLES * (NUM_CALLS + len(drivers) - 1)
    results = [result for row in rows for result in _observed(drivers[-1], row)]
    assert len(set(results)) == len(results) == NUM_SAMPLES * NUM_CALLS


def _observed(driver: Driver, row: dict[str, Any]) -> Sequence[str]:
    """Return the texts that a conversation observed."""
    found, at = [], 0
    for turn in row["turns"][:-1]:
        begin = at + turn["num_sampled"]
        at = begin + turn["num_observed"]
        found.append(driver.actor._tokenizer.decode(row["response_token_ids"][begin:at]))
    return found
