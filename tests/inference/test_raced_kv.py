"""Keys and values go along with a race.

The copy continues without a prefill, the original goes on, and no token changes in either.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.inference.kv import saving
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest
from tests.inference.switching import (
    Moved,
    assert_as_before,
    assert_most_differ,
    assert_moved,
    assert_recomputed,
    begin,
    files_of,
    finished_on,
    generate,
    load,
    zero_files,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]


async def race(
    origin: RayEngine,
    target: RayEngine,
    todo: Sequence[RolloutRequest],
    meanwhile: Callable[[Sequence[RolloutRequest]], None] = lambda _: None,
) -> tuple[dict[RequestId, Rollout], Moved]:
    """Race the requests. Return the rollouts of the origin, and those of the target.

    Both engines run all requests to the end. `meanwhile`: receives the copies before the target.
    """
    await begin(origin, todo)
    copies = await origin.copy([request.id for request in todo], keep_kv=True)
    assert len(copies) >= len(todo) // 2, "too few requests were copied in the middle"
    meanwhile(copies)
    there = await generate(target, copies)
    return await finished_on(origin, len(todo)), Moved(copies, there)


@pytest.mark.parametrize("from_tp", [1, 2])
async def test_raced_kv_moves_along_and_no_token_changes(
    engines, tp2, weights, long_requests, without_switch, from_tp
):
    """Keys and values go along from TP 1 and TP 2, and no token changes."""
    origin = tp2 if from_tp == 2 else engines[0]
    await load([*engines, tp2], weights)
    await origin.take_kv_counts()
    here, there = await race(origin, engines[1], long_requests)
    assert_as_before(here, without_switch)
    assert_as_before(there.finished, without_switch)
    assert_moved(there)
    counts = await origin.take_kv_counts()
    assert (counts.num_copied, counts.num_saved) == (len(there.requests), 0)
    assert counts.copy_s > counts.export_s == 0.0


async def test_wrong_ones_would_show(engines, weights, long_requests, without_switch):
    """Negative control: with zeroed copies, the target's tokens differ. The origin's stay right."""
    await load(engines, weights)
    here, there = await race(*engines, long_requests, lambda copies: zero_files(files_of(copies)))
    assert_as_before(here, without_switch)
    assert_moved(there)
    assert_most_differ(there, without_switch)


async def test_races_keep_precopies_for_a_switch(engines, tp2, weights, long_prompts):
    """Requests may be raced while their pool prepares a switch of its TP degree."""
    origin = engines[0]
    await load([*engines, tp2], weights)
    expected = await generate(origin, long_prompts)
    await load([*engines, tp2], weights)
    await begin(origin, long_prompts)
    ids = [request.id for request in long_prompts]
    ahead = await origin.precopy(ids)
    copies = await origin.copy(ids, keep_kv=True)
    left = await origin.withdraw(ids, keep_kv=True)
    assert {request.kv.path for request in left} == {ahead.path}
    assert not {request.kv.path for request in copies} & {ahead.path}
    # There is one early part and one last file: the withdrawal uses the part.
    sizes = {path.name: path.stat().st_size for path in files_of(left)}
    assert len(sizes) == 2
    early = await finished_on(origin, len(ids) - len(left))
    moved = Moved(left, await generate(tp2, left))
    raced = Moved(copies, await generate(engines[1], copies))
    for finished in (early, moved.finished, raced.finished):
        assert_as_before(finished, expected)
    assert_moved(moved)
    assert_moved(raced)


def _keep_for(seconds: float):
    def on_actor(_engine) -> None:
        saving.COPIES_KEPT_S = seconds

    return on_actor


async def test_old_ones_are_deleted_and_computed_again(
    engines, weights, long_requests, without_switch
):
    """A later copy deletes expired ones. The target computes those requests again."""
    origin, target = engines
    await load(engines, weights)
    await begin(origin, long_requests)
    ids = [request.id for request in long_requests]
    await origin.actor.__ray_call__.remote(_keep_for(0.0))
    first = await origin.copy(ids, keep_kv=True)
    second = await origin.copy(ids, keep_kv=True)
    await origin.actor.__ray_call__.remote(_keep_for(saving.COPIES_KEPT_S))
    assert not any(Path(request.kv.path).exists() for request in first)
    assert files_of(second)
    moved = Moved(first, await generate(target, first))
    assert_as_before(moved.finished, without_switch)
    assert_recomputed(moved)
    await finished_on(origin, len(ids))
