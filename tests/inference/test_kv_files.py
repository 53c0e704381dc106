"""Keys and values go through files: every rank finds its heads, whichever ranks saved them.

Damaged files, and files of other weights, are refused. The second half tests the engine's side.
"""

import asyncio
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines import shared_memory as shared_memory_module
from refrain.engines.inference.kv import files as kv_files
from refrain.engines.inference.kv import saving as kv_saving
from refrain.engines.inference.kv.files import (
    UNREADABLE,
    KVFiles,
    extents_of,
    rank_file,
    write_blocks,
)
from refrain.engines.inference.kv.heads import heads_of, pieces, saves
from refrain.engines.inference.kv.saving import KVSaving
from refrain.schemas.rollout import RequestId, RolloutRequest, SavedKV, Split

LAYERS = ("a", "b")
IDENTITY = {"model": "m", "policy_version": "3"}
BLOCK, WIDTH, NUM_BLOCKS = 4, 6, 12

degrees = st.sampled_from([1, 2, 4, 8])


@given(degrees, degrees, degrees)
def test_every_head_is_found_once_where_it_was_saved(tp_degree, saved_tp_degree, num_heads):
    for rank in range(tp_degree):
        wanted = heads_of(rank, tp_degree, num_heads)
        found: list[tuple[int, int]] = []
        for piece in pieces(rank, tp_degree, saved_tp_degree, num_heads):
            saved = heads_of(piece.saved_by, saved_tp_degree, num_heads)
            assert saves(piece.saved_by, saved_tp_degree, num_heads)
            found += zip(wanted[piece.here], saved[piece.there], strict=True)
        assert found == [(head, head) for head in wanted]


@given(degrees, degrees)
def test_each_head_is_saved_once(tp_degree, num_heads):
    saved = [
        head
        for rank in range(tp_degree)
        if saves(rank, tp_degree, num_heads)
        for head in heads_of(rank, tp_degree, num_heads)
    ]
    assert saved == list(range(num_heads))


def caches(num_heads: int, seed: int | None = None) -> dict[str, torch.Tensor]:
    shape = (NUM_BLOCKS, num_heads, BLOCK, WIDTH)
    generator = torch.Generator().manual_seed(seed or 0)
    draw = torch.zeros if seed is None else torch.randn
    kwargs = {} if seed is None else {"generator": generator}
    return {layer: draw(*shape, **kwargs) for layer in LAYERS}


def shard(whole: dict[str, torch.Tensor], rank: int, tp_degree: int, num_heads: int):
    heads = heads_of(rank, tp_degree, num_heads)
    return {layer: cache[:, heads.start : heads.stop].clone() for layer, cache in whole.items()}


def write_in_parts(directory, rank, own, blocks, num_tokens, num_early):
    """Write a rank's file. Write the first blocks of y to part files before.

    `num_early`: for each part, the number of y's blocks in all parts up to it.
    """
    extents, begin = [], 0
    for part, end in enumerate(num_early, 1):
        some = {"y": blocks["y"][begin:end], "z": [0]}
        write_blocks(rank_file(directory, rank, part), own, some, {"y": 0, "z": 0}, IDENTITY)
        extents.append(extents_of(some, part)["y"])
        begin = end
    path, rest = rank_file(directory, rank), blocks | {"y": blocks["y"][begin:]}
    size = write_blocks(path, own, rest, num_tokens, IDENTITY, {"y": extents})
    assert path.stat().st_size == size


@settings(max_examples=60, deadline=None)
@given(degrees, degrees, degrees, st.data())
def test_layouts_load_kv_of_other_layouts(
    tmp_path_factory, tp_degree, saved_tp_degree, num_heads, data
):
    directory = tmp_path_factory.mktemp("kv")
    whole = caches(num_heads, seed=1)
    order = data.draw(st.permutations(range(NUM_BLOCKS)))
    cut = data.draw(st.integers(1, NUM_BLOCKS - 1))
    blocks = {"x": order[:cut], "y": order[cut:]}
    num_tokens = {name: BLOCK * len(of_one) - 1 for name, of_one in blocks.items()}
    num_early = sorted(data.draw(st.lists(st.integers(0, len(blocks["y"])), max_size=2)))
    for rank in range(saved_tp_degree):
        if saves(rank, saved_tp_degree, num_heads):
            own = shard(whole, rank, saved_tp_degree, num_heads)
            write_in_parts(directory, rank, own, blocks, num_tokens, num_early)
    skipped = data.draw(st.integers(0, len(blocks["y"]) - 1))
    to = torch.tensor(data.draw(st.permutations(range(NUM_BLOCKS)))[: len(blocks["y"]) - skipped])
    for rank in range(tp_degree):
        loaded = shard(caches(num_heads), rank, tp_degree, num_heads)
        files = KVFiles()
        for piece in pieces(rank, tp_degree, saved_tp_degree, num_heads):
            file = files.open(rank_file(directory, piece.saved_by), IDENTITY)
            assert file.find("y").num_tokens == num_tokens["y"]
            files.copy_heads(directory, IDENTITY, "y", skipped, piece, loaded, to)
        expected = shard(whole, rank, tp_degree, num_heads)
        for layer in LAYERS:
            assert torch.equal(loaded[layer][to], expected[layer][list(blocks["y"][skipped:])])
            untouched = [block for block in range(NUM_BLOCKS) if block not in to]
            assert not loaded[layer][untouched].any()


@pytest.fixture
def saved(tmp_path):
    path = rank_file(tmp_path, 0)
    blocks, num_tokens = {"x": [3, 1], "other": [5]}, {"x": 7, "other": 2}
    write_blocks(path, caches(2, seed=1), blocks, num_tokens, IDENTITY)
    return path


(WHOLE,) = pieces(0, 1, 1, 2)


def test_bfloat16_too(tmp_path):
    """Keys and values in bfloat16 are saved and loaded unchanged."""
    path, whole = rank_file(tmp_path, 0), caches(2, seed=1)
    half = {layer: cache.bfloat16() for layer, cache in whole.items()}
    write_blocks(path, half, {"x": [3, 1]}, {"x": 7}, IDENTITY)
    loaded = {layer: torch.zeros_like(cache) for layer, cache in half.items()}
    load(path, loaded)
    assert torch.equal(loaded["b"][:2], half["b"][[3, 1]])


def load(path, like, name="x", num_blocks=2, identity=IDENTITY):
    to = torch.arange(num_blocks)
    KVFiles().copy_heads(path.parent, identity, name, 0, WHOLE, like, to)


def test_unfit_kv_files_are_not_loaded(saved):
    good = caches(2)
    load(saved, good)
    bad: list[dict[str, Any]] = [
        {"identity": IDENTITY | {"policy_version": "4"}},
        {"identity": IDENTITY | {"model": "other"}},
        {"name": "y"},
        {"num_blocks": 3},
        {"like": {layer: cache[..., :-1] for layer, cache in caches(2).items()}},
        {"like": {layer: cache[:, :, :-1] for layer, cache in caches(2).items()}},
        {"like": {layer: cache.bfloat16() for layer, cache in caches(2).items()}},
        {"like": caches(2) | {"c": caches(2)["a"]}},
    ]
    for change in bad:
        with pytest.raises(UNREADABLE):
            load(**({"path": saved, "like": caches(2)} | change))
    saved.rename(rank_file(saved.parent, 1))
    with pytest.raises(UNREADABLE):
        load(saved, caches(2))


def test_a_damaged_file_is_not_loaded(saved):
    whole = saved.read_bytes()
    for damaged in (b"", whole[:5], whole[:-1], whole[:70], b"\0" * len(whole), whole + b"\0"):
        saved.write_bytes(damaged)
        with pytest.raises(UNREADABLE):
            load(saved, caches(2))


def test_without_a_part_nothing_of_it_is_loaded(tmp_path):
    """A request with a missing, damaged or outdated part file is not loaded. Others are."""
    own, blocks, num_tokens = caches(2, seed=1), {"x": [5], "y": [3, 1, 4]}, {"x": 4, "y": 11}
    write_in_parts(tmp_path, 0, own, blocks, num_tokens, [1, 2])
    part, later = rank_file(tmp_path, 0, 2), rank_file(tmp_path, 0)
    load(later, caches(2), "y", 3)
    whole = part.read_bytes()
    for damage in (part.unlink, lambda: part.write_bytes(whole[:-1])):
        damage()
        with pytest.raises(UNREADABLE):
            load(later, caches(2), "y", 3)
    write_blocks_anew(part, own, {"policy_version": "2", "model": "m"})
    with pytest.raises(UNREADABLE):
        load(later, caches(2), "y", 3)
    loaded = caches(2)
    load(later, loaded, "x", 1)
    assert torch.equal(loaded["a"][0], own["a"][5])


def write_blocks_anew(path, own, identity):
    path.unlink()
    write_blocks(path, own, {"y": [1], "z": [0]}, {"y": 0, "z": 0}, identity)


def test_a_file_that_is_open_is_read_though_it_was_deleted(saved):
    files = KVFiles()
    files.open(saved, IDENTITY).touch()
    saved.unlink()
    loaded = caches(2)
    files.copy_heads(saved.parent, IDENTITY, "x", 0, WHOLE, loaded, torch.arange(2))
    assert torch.equal(loaded["b"][:2], caches(2, seed=1)["b"][[3, 1]])
    files.close()
    with pytest.raises(UNREADABLE):
        files.open(saved, IDENTITY)


def test_full_memory_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        kv_files.shutil, "disk_usage", lambda _: usage._replace(total=10_000, free=1_500)
    )
    path = rank_file(tmp_path, 0)
    with pytest.raises(OSError, match="give it more memory"):
        write_blocks(path, caches(2, seed=1), {"x": [3, 1]}, {"x": 7}, IDENTITY)
    assert not path.exists()


# The engine's side

IDS = [RequestId(Split.TRAIN, 1, "p", i) for i in range(3)]


@dataclass
class FakeLLM:
    """Fake of vLLM with two ranks. The second rank saves one request less."""

    error: str = ""
    ahead_s: float = 0.01
    steps: list[str] = field(default_factory=list)
    with_ahead: list[bool] = field(default_factory=list)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        assert self.steps.count("pause") == self.steps.count("resume"), "paused twice at once"
        self.steps.append("pause")

    async def resume_generation(self) -> None:
        self.steps.append("resume")

    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        self.steps.append(method)
        if method == "take_kv_loads":
            return [(200, 0.5), (300, 0.2)]
        directory, num_tokens, _, *with_ahead = args
        self.with_ahead += with_ahead
        if method == "save_kv_ahead":
            return [self._written_later(Path(directory)), ""]
        names = list(num_tokens)
        await asyncio.sleep(0)
        return [[names, 10, ""], [[] if self.error else names[:-1], 5, self.error]]

    def _written_later(self, directory: Path) -> str:
        """Write a part of three bytes after `ahead_s`. Return its path."""
        file = rank_file(directory, 0, len(self.steps))
        asyncio.get_running_loop().call_later(self.ahead_s, file.write_bytes, b"abc")
        return str(file)


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory_module, "shared_memory", lambda: tmp_path)
    return tmp_path


async def withdraw(saving: KVSaving, *, copies: bool = False) -> dict[RequestId, SavedKV]:
    async with saving.paused():
        return await saving.save(dict.fromkeys(IDS, 7), 3, copies=copies)


async def test_kv_of_all_ranks_is_saved_until_cleared(shared_memory):
    llm = FakeLLM()
    saving = KVSaving(llm, 2)
    first, second = await asyncio.gather(withdraw(saving), withdraw(saving))
    assert list(first) == list(second) == IDS[:-1]
    assert first[IDS[0]].path != second[IDS[0]].path
    assert (first[IDS[0]].num_tokens, first[IDS[0]].tp_degree) == (7, 2)
    assert llm.steps == ["pause", "save_kv", "resume"] * 2
    counts = await saving.take_counts()
    assert (counts.num_requests, counts.num_saved, counts.num_bytes) == (6, 4, 30)
    saving.clear()
    saving.clear()
    assert not list(shared_memory.iterdir())


async def test_unsaved_kv_is_counted_and_the_engine_continues(shared_memory, caplog):
    llm = FakeLLM(error="no space")
    saving = KVSaving(llm, 2)
    assert await withdraw(saving) == {}
    assert (await saving.take_counts()).num_failures == 1
    assert "no space" in caplog.text
    shutil.rmtree(shared_memory)
    assert await withdraw(saving) == {}
    assert (await saving.take_counts()).num_failures == 1
    assert llm.steps == ["pause", "save_kv", "resume", "pause", "resume"]


async def test_precopied_kv_is_part_of_the_next_withdrawal(shared_memory, monkeypatch):
    assert shared_memory.exists()
    llm, ahead = FakeLLM(), []
    saving = KVSaving(llm, 2)
    for _ in range(2):
        ahead.append(await saving.save_ahead(dict.fromkeys(IDS, 7), 3))
        assert len(list(Path(ahead[-1].path).iterdir())) == len(ahead)
    first, second = await withdraw(saving), await withdraw(saving)
    assert {one.path for one in ahead} == {saved.path for saved in first.values()}
    assert first[IDS[0]].path != second[IDS[0]].path
    assert llm.steps == ["save_kv_ahead"] * 2 + ["pause", "save_kv", "resume"] * 2
    counts = await saving.take_counts()
    assert (counts.num_bytes_ahead, counts.num_bytes) == (6, 30)
    assert counts.ahead_s > 0.02
    assert await saving.save_ahead({}, 3) is None
    llm.ahead_s = 0.1
    monkeypatch.setattr(kv_saving, "AHEAD_S", 0.02)
    assert await saving.save_ahead({IDS[0]: 7}, 3), "saving ahead waits at most `AHEAD_S`"
    assert (await saving.take_counts()).num_bytes_ahead == 0
    saving.clear()
    assert Path((await withdraw(saving))[IDS[0]].path).is_dir()


async def test_copies_are_kept_for_a_while_and_leave_what_was_saved_ahead(
    shared_memory, monkeypatch
):
    assert shared_memory.exists()
    llm = FakeLLM()
    saving = KVSaving(llm, 2)
    ahead = await saving.save_ahead(dict.fromkeys(IDS, 7), 3)
    copies = [await withdraw(saving, copies=True) for _ in range(2)]
    assert llm.with_ahead == [False, False]
    paths = [Path(saved[IDS[0]].path) for saved in copies]
    assert (await withdraw(saving))[IDS[0]].path == ahead.path
    assert llm.with_ahead == [False, False, True]
    assert len({*paths, Path(ahead.path)}) == 3
    assert all(path.is_dir() for path in paths)
    counts = await saving.take_counts()
    assert (counts.num_copied, counts.num_saved) == (4, 2)
    monkeypatch.setattr(kv_saving, "COPIES_KEPT_S", 0.0)
    kept = Path((await withdraw(saving, copies=True))[IDS[0]].path)
    assert [path.exists() for path in (*paths, kept, Path(ahead.path))] == [0, 0, 1, 1]
    saving.clear()
    assert not list(shared_memory.iterdir())


async def test_ranks_are_asked_for_their_loads_once_some_came():
    """The slowest rank counts."""
    llm = FakeLLM()
    saving = KVSaving(llm, 2)
    request = RolloutRequest(IDS[0], (1, 2), 0, 10)
    saving.note([request])
    assert (await saving.take_counts()).load_s == 0.0
    saving.note([replace(request, kv=SavedKV("there", 5, 1)), request])
    counts = await saving.take_counts()
    assert (counts.num_bytes_loaded, counts.load_s) == (200, 0.5)
    assert (await saving.take_counts()).load_s == 0.0
    assert llm.steps == ["take_kv_loads"]


async def test_engine_continues_after_any_failure(shared_memory):
    assert shared_memory.exists()
    llm = FakeLLM()
    with suppress(KeyError):
        async with KVSaving(llm, 1).paused():
            raise KeyError
    assert llm.steps == ["pause", "resume"]
