"""The library reports missing indexes, refuses damaged files and keeps to its size limit."""

import os
from random import Random

import pytest

from refrain.engines.histospec.index_file import cold_path, index_path, open_index
from refrain.engines.histospec.library import IndexLibrary, PromptHistory
from refrain.schemas.drafting import DraftingConfig
from tests.histospec.test_index import draft

KEYS = [f"{n:032x}" for n in range(6)]


def history(key, step=1, tokens=(1, 2, 3, 4, 5)):
    return PromptHistory(key, step, [7, 8, 9], [list(tokens)] * 2, [1.0, 0.0])


def library(directory, max_bytes=10**9, owns=lambda _: True, **options):
    return IndexLibrary(directory, DraftingConfig(max_index_bytes=max_bytes, **options), owns)


@pytest.fixture
def filled(tmp_path):
    filled = library(tmp_path)
    filled.add([history(key) for key in KEYS])
    return filled


def wanted(step=1):
    return dict.fromkeys(KEYS, step)


def test_existing_indexes_are_not_missing(tmp_path, filled):
    assert filled.missing(wanted()) == []
    assert draft(open_index(index_path(tmp_path, KEYS[0]), KEYS[0]), [1, 2, 3], 2) == [4, 5]
    counts = filled.counts()
    assert (counts.num_indexes, counts.num_built) == (6, 6)
    assert counts.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_an_index_of_another_step_is_missing(filled):
    assert filled.missing(wanted(step=2)) == KEYS
    filled.add([history(KEYS[2], step=2)])
    assert filled.missing(wanted(step=2)) == [key for key in KEYS if key != KEYS[2]]


@pytest.mark.usefixtures("filled")
def test_a_restart_finds_the_files_and_checks_them(tmp_path):
    path = index_path(tmp_path, KEYS[1])
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    index_path(tmp_path, KEYS[4]).unlink()
    (tmp_path / f"{KEYS[3]}.index.123.tmp").write_bytes(b"half")
    again = library(tmp_path)
    assert again.counts().num_indexes == 5
    assert again.missing(wanted()) == [KEYS[1], KEYS[4]]
    assert again.counts().num_damaged == 1
    again.add([history(KEYS[1]), history(KEYS[4])])
    assert again.missing(wanted()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{key}.index" for key in KEYS]


@pytest.mark.usefixtures("filled")
def test_an_index_of_other_settings_is_missing(tmp_path):
    assert library(tmp_path, max_draft=9).missing(wanted()) == KEYS


def test_damage_in_mid_run_is_noticed(tmp_path, filled):
    assert filled.missing(wanted()) == []
    path = index_path(tmp_path, KEYS[0])
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(1, 1))
    assert filled.missing(wanted()) == [KEYS[0]]


def test_histories_returning_last_are_compressed_then_deleted(tmp_path):
    size, cold = _size(tmp_path / "one"), _cold_size(tmp_path / "cold")
    small = library(tmp_path / "many", max_bytes=2 * size + 3 * cold // 2)
    small.add([history(key, step) for step, key in enumerate(KEYS[:3], 1)])
    assert _files(small) == [f"{KEYS[0]}.index", f"{KEYS[1]}.index", f"{KEYS[2]}.index.zst"]
    small.add([history(KEYS[3], 4)])
    assert _files(small) == [f"{KEYS[0]}.index", *(f"{key}.index.zst" for key in KEYS[1:4])]
    small._max_bytes = 5 * cold // 2
    small.add([history(KEYS[4], 5)])
    assert _files(small) == [f"{key}.index.zst" for key in KEYS[:2]]
    counts = small.counts()
    assert counts.num_evicted == 3
    assert counts.num_bytes == sum(p.stat().st_size for p in small._directory.iterdir())
    assert counts.num_indexes == 2


def test_needed_indexes_are_uncompressed(tmp_path):
    size, cold = _size(tmp_path / "one"), _cold_size(tmp_path / "cold")
    small = library(tmp_path / "many", max_bytes=2 * size + 5 * cold)
    small.add([history(key, step) for step, key in enumerate(KEYS, 1)])
    before = [open_index(index_path(small._directory, KEYS[0]), KEYS[0]).text.tolist()]
    # KEYS[4] is compressed, KEYS[0] is not.
    returning = {KEYS[0]: 1, KEYS[4]: 5}
    assert small.missing(returning) == []
    assert [f"{key}.index" for key in returning] == [f for f in _files(small) if f[-1] == "x"]
    assert small.counts().num_restored == 1
    restored = open_index(index_path(small._directory, KEYS[4]), KEYS[4])
    assert [restored.text.tolist()] == before
    # They stay uncompressed while other histories are added and looked up.
    small.add([history(KEYS[1], 7)])
    assert small.missing({KEYS[1]: 7}) == []
    assert set(_files(small)) >= {f"{key}.index" for key in returning}


def test_rebuilt_indexes_of_the_next_step_are_uncompressed(tmp_path):
    """It stays uncompressed even though later histories are in the library."""
    size, cold = _size(tmp_path / "one"), _cold_size(tmp_path / "cold")
    small = library(tmp_path / "many", max_bytes=size + 7 * cold // 2)
    assert 2 * size + 2 * cold > size + 7 * cold // 2
    small.add([history(key, step) for step, key in enumerate(KEYS[:4], 1)])
    assert _files(small) == [f"{KEYS[0]}.index", *(f"{key}.index.zst" for key in KEYS[1:4])]
    cold_path(small._directory, KEYS[1]).unlink()
    assert small.missing({KEYS[1]: 2}) == [KEYS[1]]
    small.add([history(KEYS[1], 2)])
    assert [name for name in _files(small) if name.endswith(".index")] == [f"{KEYS[1]}.index"]


def test_a_restart_finds_what_is_compressed_and_refuses_damage(tmp_path):
    size, cold = _size(tmp_path / "one"), _cold_size(tmp_path / "cold")
    full = library(tmp_path / "many", max_bytes=size + 7 * cold // 2)
    full.add([history(key, step) for step, key in enumerate(KEYS[:4], 1)])
    damaged = cold_path(full._directory, KEYS[2])
    damaged.write_bytes(damaged.read_bytes()[:-9])
    flipped = bytearray(cold_path(full._directory, KEYS[3]).read_bytes())
    flipped[len(flipped) // 2] ^= 1
    cold_path(full._directory, KEYS[3]).write_bytes(flipped)
    again = library(tmp_path / "many")
    wanted = {key: step for step, key in enumerate(KEYS[:4], 1)}
    assert again.missing(wanted) == KEYS[2:4]
    assert again.counts().num_damaged == 2
    again.add([history(key, wanted[key]) for key in KEYS[2:4]])
    assert again.missing(wanted) == []
    assert _files(again) == [f"{key}.index" for key in KEYS[:4]]


def test_a_compressed_index_of_another_step_is_not_made_whole(tmp_path):
    small = library(tmp_path / "many", max_bytes=2 * _cold_size(tmp_path / "cold"))
    small.add([history(KEYS[0], 3)])
    assert small.missing({KEYS[0]: 4}) == [KEYS[0]]
    assert _files(small) == [f"{KEYS[0]}.index.zst"]
    assert small.counts().num_restored == 0


def test_threads_build_what_one_does(tmp_path):
    rng = Random(1)
    many = [history(key, 1, [rng.randrange(50) for _ in range(300)]) for key in KEYS]
    one, three = library(tmp_path / "one"), _threaded(tmp_path / "three", 3)
    one.add(many)
    three.add(many)
    assert three.counts().num_built == len(KEYS)
    for key in KEYS:
        first, second = (index_path(it._directory, key).read_bytes() for it in (one, three))
        assert first == second


@pytest.mark.parametrize("shuffled", [False, True])
def test_half_the_space_holds_half_the_histories(tmp_path, shuffled):
    keys = [f"{n:032x}" for n in range(40)]
    small = library(tmp_path / "many", max_bytes=20 * _size(tmp_path / "one"))
    order, last, hits = Random(0), {}, 0
    for epoch in range(4):
        if shuffled:
            order.shuffle(keys)
        for key in keys:
            hits += key in last and not small.missing({key: last[key]})
            last[key] = len(keys) * epoch + keys.index(key)
            small.add([history(key, last[key])])
    assert hits >= 0.4 * 3 * len(keys)


def test_an_index_larger_than_the_cap_is_not_kept(tmp_path):
    tiny = library(tmp_path, max_bytes=10)
    tiny.add([history(KEYS[0])])
    assert tiny.counts().num_evicted == 1
    assert list(tmp_path.iterdir()) == []
    assert tiny.missing({KEYS[0]: 1}) == [KEYS[0]]


def test_libraries_share_a_directory(tmp_path, filled):
    even = library(tmp_path, owns=lambda key: int(key, 16) % 2 == 0)
    assert even.counts().num_indexes == 3
    even.add([history(KEYS[0], step=5)])
    assert filled.missing({KEYS[1]: 1}) == []


def _size(directory):
    one = library(directory)
    one.add([history(KEYS[0])])
    return one.counts().num_bytes


def _cold_size(directory):
    tiny = library(directory, max_bytes=_size(directory) - 1)
    tiny.add([history(KEYS[0])])
    return tiny.counts().num_bytes


def _files(of):
    return sorted(path.name for path in of._directory.iterdir())


def _threaded(directory, num_threads):
    return IndexLibrary(directory, DraftingConfig(), num_threads=num_threads)
