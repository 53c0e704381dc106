"""Real engines save keys and values while their requests still generate.

No token changes, and the target uses the blocks that were saved ahead.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from refrain.engines.inference.kv.files import part_files
from refrain.engines.rollout.interface import EngineDied
from refrain.schemas.rollout import RolloutRequest
from tests.inference.switching import (
    assert_as_before,
    assert_most_differ,
    assert_moved,
    assert_recomputed,
    begin,
    files_of,
    finished_on,
    generate,
    load,
    move,
    zero_files,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]


def parts_of(moved: Sequence[RolloutRequest]) -> set[Path]:
    parts = {part for r in moved for rank in (0, 1) for part in part_files(Path(r.kv.path), rank)}
    assert parts < files_of(moved)
    return parts


def zero_parts(moved: Sequence[RolloutRequest]) -> None:
    zero_files(parts_of(moved))


def delete_parts(moved: Sequence[RolloutRequest]) -> None:
    for path in parts_of(moved):
        path.unlink()


async def test_precopied_kv_moves_with_its_requests(engines, tp2, weights, long_prompts):
    """Requests move from TP 1 to TP 2, and from TP 2 to TP 1."""
    await load([*engines, tp2], weights)
    expected = await generate(engines[0], long_prompts)
    for sources, target in ((engines, tp2), ([tp2], engines[0])):
        await load([*engines, tp2], weights)
        for engine in sources:
            await engine.take_kv_counts()
        ahead = {"keep_kv": True, "ahead": True, "meanwhile": parts_of}
        moved = await move(sources, target, long_prompts, **ahead)
        assert_as_before(moved.finished, expected)
        assert_moved(moved)
        loaded = await target.take_kv_counts()
        assert loaded.num_bytes_loaded > 0
        assert 1e6 < loaded.num_bytes_loaded / loaded.load_s < 1e11
        counts = [await engine.take_kv_counts() for engine in sources]
        assert all(c.num_bytes_ahead > c.num_bytes > 0 for c in counts)


async def test_wrong_keys_and_values_of_before_would_show(engines, tp2, weights, long_prompts):
    """Negative control: with zeroed early copies, most tokens differ. So the target uses them."""
    await load([*engines, tp2], weights)
    expected = await generate(engines[0], long_prompts)
    await load([*engines, tp2], weights)
    ahead = {"keep_kv": True, "ahead": True, "meanwhile": zero_parts}
    moved = await move(engines, tp2, long_prompts, **ahead)
    assert_moved(moved)
    assert_most_differ(moved, expected)


async def test_without_what_was_saved_ahead_all_is_computed_again(
    engines, tp2, weights, long_prompts
):
    source = engines[0]
    await load([source, tp2], weights)
    expected = await generate(source, long_prompts)
    await load([source, tp2], weights)
    ahead = {"keep_kv": True, "ahead": True, "meanwhile": delete_parts}
    moved = await move([source], tp2, long_prompts, **ahead)
    assert_as_before(moved.finished, expected)
    assert_recomputed(moved)


async def test_blocks_that_became_others_are_not_taken(engines, tp2, weights, long_prompts):
    """Requests begin again with the same names, on blocks that others had meanwhile.

    Copies of their first run must not be used.
    """
    source, target = engines[0], tp2
    first, others = long_prompts[::2], long_prompts[1::2]
    await load([source, target], weights)
    expected = await generate(source, long_prompts)
    await load([source, target], weights)
    await begin(source, first)
    ids = [request.id for request in first]
    assert await source.precopy(ids)
    taken = await source.withdraw(ids)
    await load([source], weights)
    finished = await generate(source, others)
    await load([source], weights)
    await begin(source, first)
    moved = await source.withdraw(ids, keep_kv=True)
    assert taken
    assert moved
    finished |= await finished_on(source, len(first) - len(moved))
    finished |= await generate(target, moved)
    assert_as_before(finished, expected)


async def test_requests_that_stay_continue_and_are_precopied_again(
    engines, tp2, weights, long_prompts
):
    source, target = engines[1], tp2
    await load([source, target], weights)
    expected = await generate(source, long_prompts)
    await load([source, target], weights)
    await begin(source, long_prompts)
    ids = [request.id for request in long_prompts]
    first = await source.precopy(ids)
    moved = await source.withdraw(ids[::2], keep_kv=True)
    second = await source.precopy(ids)
    moved += await source.withdraw(ids[1::2], keep_kv=True)
    assert first
    assert second
    assert first.path != second.path
    finished = await finished_on(source, len(ids) - len(moved))
    finished |= await generate(target, moved)
    assert_as_before(finished, expected)
    assert await source.precopy(ids) is None, "no request is left"


async def test_of_an_engine_that_dies_in_between_nothing_is_missed(
    engines, tp2, weights, long_prompts
):
    """Its early copies are not used: without the last file, no part counts."""
    source, other = engines[1], engines[0]
    await load([source, other], weights)
    expected = await generate(other, long_prompts)
    await begin(source, long_prompts)
    ids = [request.id for request in long_prompts]
    saved = await source.precopy(ids)
    await tp2.expect_kv([saved])
    source._actor.kill()
    with pytest.raises(EngineDied):
        await source.withdraw(ids, keep_kv=True)
    await source.start()
    await load([source, tp2], weights)
    assert_as_before(await generate(source, long_prompts), expected)
    assert_as_before(await generate(tp2, long_prompts), expected)
