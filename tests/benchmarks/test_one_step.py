"""Rollouts of a bench come back from their rows, with the turns of a conversation."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from refrain.benchmarks.one_step import fetch
from refrain.engines.store.rows import rollout_rows, to_stream
from refrain.schemas.rollout import Turn
from tests.store.test_turns import talk


@pytest.mark.parametrize("turns", [(), (Turn(2, 3, 0.5, None, 2, 1), Turn(4, score=0.5))])
def test_a_rollout_comes_back_with_its_turns(turns: tuple[Turn, ...]) -> None:
    rollouts = [talk(turns, 0.25, sample=index) for index in range(2)]

    async def fetched() -> list[Any]:
        rows: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        rows.set_result(to_stream(rollout_rows(rollouts)))
        told = [replace(one.without_tokens(row), rows=rows) for row, one in enumerate(rollouts)]
        return await fetch(told)

    for found, expected in zip(asyncio.run(fetched()), rollouts, strict=True):
        given = expected.generated
        assert (found.id, found.generated.turns) == (expected.id, turns)
        assert found.generated.score == 0.25
        assert list(found.generated.token_ids) == given.token_ids
        assert list(found.generated.inference_logprobs) == given.inference_logprobs
        assert found.generated.spans == given.spans
