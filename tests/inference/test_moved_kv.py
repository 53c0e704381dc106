"""Keys and values move with their requests. Without them, the target computes them again."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

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


def zero(moved: Sequence[RolloutRequest]) -> None:
    zero_files(files_of(moved))


async def test_wrong_keys_and_values_would_show(
    engines, tp2, weights, long_requests, without_switch
):
    """Negative control: with zeroed keys and values, most tokens differ."""
    await load([*engines, tp2], weights)
    moved = await move(engines, tp2, long_requests, keep_kv=True, meanwhile=zero)
    assert_moved(moved)
    assert_most_differ(moved, without_switch)


def zero_first_blocks(moved: Sequence[RolloutRequest]) -> None:
    """Zero the first two blocks of each request."""
    for path in files_of(moved):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        for _, ((_, first, _),) in json.loads(metadata["requests"]).values():
            for tensor in tensors.values():
                tensor[first : first + 2] = 0.0
        save_file(tensors, path, metadata)


async def test_blocks_in_the_prefix_cache_are_not_loaded(engines, tp2, weights, long_prompts):
    """The files' first blocks are zeroed, so loading them would change tokens."""
    source, target = engines[0], tp2
    await load([source, target], weights)
    expected = await generate(source, long_prompts)
    assert_as_before(await generate(target, long_prompts[:1]), expected)
    moved = await move([source], target, long_prompts, keep_kv=True, meanwhile=zero_first_blocks)
    assert_as_before(moved.finished, expected)
    assert_moved(moved)


def delete_one(moved: Sequence[RolloutRequest]) -> None:
    max(files_of(moved)).unlink()


def cut_short(moved: Sequence[RolloutRequest]) -> None:
    for path in files_of(moved):
        path.write_bytes(path.read_bytes()[:-1])


def of_another_type(moved: Sequence[RolloutRequest]) -> None:
    """Change the data type, which only the ranks notice, when they load the file."""
    for path in files_of(moved):
        path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))


def of_other_weights(moved: Sequence[RolloutRequest]) -> None:
    for path in files_of(moved):
        before, after = (json.dumps({"policy_version": v})[1:-1].encode() for v in "01")
        path.write_bytes(path.read_bytes().replace(before, after))


async def test_missing_or_damaged_kv_files_are_recomputed(
    engines, tp2, weights, long_requests, without_switch
):
    source, target = engines[0], tp2
    for spoil in (delete_one, cut_short, of_another_type, of_other_weights):
        await load([source, target], weights)
        moved = await move([source], target, long_requests, keep_kv=True, meanwhile=spoil)
        assert_as_before(moved.finished, without_switch)
        if spoil is not of_another_type:
            assert_recomputed(moved)


def _save_nowhere(engine) -> None:
    engine._saving.clear()
    engine._saving._dir = SimpleNamespace(path=Path("/dev/null/full"))


def _save_somewhere(engine) -> None:
    engine._saving._dir = None


async def test_without_room_they_are_computed_again(
    engines, tp2, weights, long_requests, without_switch
):
    source, target = engines[0], tp2
    await load([source, target], weights)
    await source.take_kv_counts()
    await source._actor.handle.__ray_call__.remote(_save_nowhere)
    moved = await move([source], target, long_requests, keep_kv=True)
    await source._actor.handle.__ray_call__.remote(_save_somewhere)
    assert_as_before(moved.finished, without_switch)
    assert_recomputed(moved)
    counts = await source.take_kv_counts()
    assert (counts.num_failures, counts.num_saved) == (1, 0)


async def test_saved_files_go_with_their_weights(engines, weights, long_requests):
    """Loading weights deletes the keys and values of the policy version before."""
    await load(engines[:1], weights)
    await begin(engines[0], long_requests)
    moved = await engines[0].withdraw([r.id for r in long_requests], keep_kv=True)
    assert files_of(moved)
    await load(engines[:1], weights)
    assert not any(Path(request.kv.path).exists() for request in moved)
    await finished_on(engines[0], len(long_requests) - len(moved))
