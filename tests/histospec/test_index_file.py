"""An index file gives the same drafts after a restart. Damaged files are refused."""

import pytest

from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import DamagedIndex, open_index, write_index
from tests.histospec.test_index import draft


@pytest.fixture
def index():
    return build_index([5, 6, 7], [[1, 2, 3, 4], [1, 2, 3, 9, 9], []], [0.5, 1.0, 0.0])


@pytest.fixture
def path(tmp_path, index):
    write_index(index, "a prompt", tmp_path / "index")
    return tmp_path / "index"


def test_an_index_is_found_again(path, index):
    again = open_index(path, "a prompt")
    for context in ([5, 6, 7], [7, 1, 2, 3], [2, 3, 9]):
        assert draft(again, context, 9) == draft(index, context, 9) != []
    assert not again.text.flags.writeable
    assert again.max_draft == index.max_draft
    assert [p.name for p in path.parent.iterdir()] == ["index"]


def test_an_empty_history_has_a_file_too(tmp_path):
    write_index(build_index([1, 2, 3], [], []), "a prompt", tmp_path / "index")
    assert draft(open_index(tmp_path / "index", "a prompt"), [1, 2, 3], 9) == []


def test_every_flipped_byte_is_noticed(path):
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(DamagedIndex, match=str(path)):
            open_index(path, "a prompt")


def test_every_cut_is_noticed(path):
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(DamagedIndex, match=str(path)):
            open_index(path, "a prompt")
    path.write_bytes(good + b"\0")
    with pytest.raises(DamagedIndex):
        open_index(path, "a prompt")


def test_another_prompts_index_is_refused(path):
    with pytest.raises(DamagedIndex, match="is the index of prompt a prompt, not another"):
        open_index(path, "another")


def test_a_new_index_replaces_the_old_one_under_a_reader(path, index):
    before = open_index(path, "a prompt")
    write_index(build_index([5, 6, 7], [[8, 8]], [1.0]), "a prompt", path)
    assert draft(before, [5, 6, 7], 2) == draft(index, [5, 6, 7], 2)
    assert draft(open_index(path, "a prompt"), [5, 6, 7], 2) == [8, 8]
