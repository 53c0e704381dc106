"""Index files: what is missing is known, what is damaged is not trusted, the cap holds."""

import os
from random import Random

import pytest

from engines.histospec.index_file import index_path, open_index
from engines.histospec.library import IndexLibrary, PromptHistory
from schemas.drafting import DraftingConfig
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


def test_what_is_there_is_not_missing(tmp_path, filled):
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


def test_what_returns_last_goes_first(tmp_path):
    size = _size(tmp_path / "one")
    small = library(tmp_path / "many", max_bytes=3 * size + size // 2)
    small.add([history(key, step) for step, key in enumerate(KEYS[:3], 1)])
    assert small.missing({KEYS[0]: 1, KEYS[2]: 3}) == []
    small.add([history(KEYS[3], 4)])
    small.add([history(KEYS[0], 5)])
    assert small.missing({KEYS[0]: 5, KEYS[1]: 2, KEYS[2]: 3, KEYS[3]: 4}) == [KEYS[3]]
    assert small.counts().num_evicted == 1
    assert small.counts().num_bytes == sum(p.stat().st_size for p in small._directory.iterdir())
    assert small.counts().num_bytes <= 3 * size + size // 2


@pytest.mark.parametrize("shuffled", [False, True])
def test_half_of_the_room_is_half_of_the_histories(tmp_path, shuffled):
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
