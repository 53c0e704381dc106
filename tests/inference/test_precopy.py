"""Copies of blocks that are made while their requests still generate.

A copy is used only if its request has owned the block all the time.
"""

from threading import Event

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.inference.kv import precopy
from refrain.engines.inference.kv.files import KVFile, rank_file
from refrain.engines.inference.kv.precopy import PreCopies
from tests.inference.test_kv_files import IDENTITY, NUM_BLOCKS, caches


class Rank:
    """A cache and its precopies. Each block holds the number of its last write."""

    def __init__(self, directory):
        self.directory = directory
        self.cache = {layer: torch.zeros_like(cache) for layer, cache in caches(2).items()}
        self.copies = PreCopies()

    def write(self, number, *rows):
        for cache in self.cache.values():
            cache[list(rows)] = float(number)

    def begin(self, **rows):
        """Copy the rows, and wait for the end."""
        path = self.copies.begin(self.path_of, self.cache, rows, IDENTITY)
        while path and not path.exists():
            pass
        return path

    def path_of(self, part):
        return rank_file(self.directory, 0, part)

    def take(self, **rows):
        """Return the numbers in the copies of each request."""
        held = self.copies.take(rows)
        return {
            name: [number for extent in extents for number in self._numbers(extent)]
            for name, extents in held.items()
        }

    def _numbers(self, extent):
        rows = slice(extent.first, extent.first + extent.num_blocks)
        layer, cache = next(iter(self.cache.items()))
        file = KVFile(self.path_of(extent.part), IDENTITY)
        saved = file.read(layer, rows, slice(0, 2), cache)
        assert saved.amin(dim=(1, 2, 3)).equal(saved.amax(dim=(1, 2, 3)))
        return saved[:, 0, 0, 0].int().tolist()


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path)


def test_new_blocks_are_copied_to_the_next_part(rank):
    """Each copy saves only blocks that are new since the last one, in a new part."""
    rank.write(1, 3, 5)
    rank.write(2, 7)
    assert rank.begin(a=[3, 5], b=[7]) == rank.path_of(1)
    rank.write(3, 8, 2)
    assert rank.begin(a=[3, 5, 8], b=[7, 2]) == rank.path_of(2)
    assert rank.begin(a=[3, 5, 8], b=[7, 2]) is None
    assert rank.take(a=[3, 5, 8, 9], b=[7, 2]) == {"a": [1, 1, 3], "b": [2, 3]}
    assert rank.take(a=[3, 5, 8], b=[7, 2]) == {}


def test_request_that_lost_its_blocks_has_no_copies(rank):
    """A preempted request may get the same blocks again, after another request wrote to them."""
    rank.write(1, 3, 5)
    rank.begin(a=[3, 5], b=[3, 5])
    rank.copies.drop(["a"])
    assert rank.take(a=[3, 5], b=[3, 5]) == {"b": [1, 1]}


def test_losing_blocks_during_the_copy_discards_it(rank, monkeypatch):
    go_on, write = Event(), precopy.write_blocks

    def late(*args, **kwargs):
        go_on.wait(10)
        return write(*args, **kwargs)

    monkeypatch.setattr(precopy, "write_blocks", late)
    rank.write(1, 3, 5)
    path = rank.copies.begin(rank.path_of, rank.cache, {"a": [3], "b": [5]}, IDENTITY)
    rank.copies.drop(["a"])
    rank.write(2, 3)
    go_on.set()
    while not path.exists():
        pass
    assert rank.take(a=[3], b=[5]) == {"b": [1]}


def test_copies_of_other_blocks_are_not_taken(rank):
    rank.write(1, 3, 5)
    rank.begin(a=[3, 5], b=[5])
    assert rank.take(a=[5, 3], b=[5, 3]) == {"b": [1]}
    rank.begin(a=[3, 5])
    rank.write(2, 7)
    assert rank.begin(a=[3, 7])
    assert rank.take(a=[3, 7]) == {"a": [1, 2]}


def test_unfinished_copies_are_not_used(rank, monkeypatch):
    """A copy that has not ended is not used, and leaves an empty file."""

    def never(*_, goes_on, **__):
        while goes_on():
            pass
        raise precopy.Stopped

    monkeypatch.setattr(precopy, "write_blocks", never)
    path = rank.copies.begin(rank.path_of, rank.cache, {"a": [3]}, IDENTITY)
    assert rank.take(a=[3]) == {}
    assert path.read_bytes() == b""
    assert list(rank.directory.iterdir()) == [path]


def test_failed_copy_is_logged_and_retried(rank, monkeypatch, caplog):
    """A failed copy is logged. The next copy saves the same blocks."""

    def full(*_, **__):
        raise OSError("no space")

    with monkeypatch.context() as context:
        context.setattr(precopy, "write_blocks", full)
        assert rank.begin(a=[3]).read_bytes() == b""
    assert "no space" in caplog.text
    rank.write(1, 3)
    rank.begin(a=[3])
    assert rank.take(a=[3]) == {"a": [1]}


class Blocks:
    """Blocks of requests. Requests may share blocks. A block without an owner is free."""

    def __init__(self):
        self.of = {}
        self.content = {}
        self.num_written = 0

    def free(self):
        held = {row for own in self.of.values() for row in own}
        return [row for row in range(NUM_BLOCKS) if row not in held]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_copies_equal_the_blocks_of_their_requests(tmp_path_factory, data):
    """Requests begin (some share blocks), grow, end, are preempted and return, in any order."""
    rank, blocks = Rank(tmp_path_factory.mktemp("kv")), Blocks()

    def write(name):
        if free := blocks.free():
            row = data.draw(st.sampled_from(free))
            blocks.num_written += 1
            blocks.content[row] = blocks.num_written
            rank.write(blocks.num_written, row)
            blocks.of[name].append(row)

    for step in range(data.draw(st.integers(1, 12))):
        names = sorted(blocks.of)
        what = data.draw(st.sampled_from(["begin", "grow", "lose", "copy"]))
        if what == "begin":
            name = data.draw(st.sampled_from(["a", "b", "c"])) if step % 2 else f"new-{step}"
            if name in blocks.of:
                continue
            like = data.draw(st.sampled_from([*names, ""]))
            blocks.of[name] = list(blocks.of[like]) if like else []
            write(name)
        elif names and what == "grow":
            write(data.draw(st.sampled_from(names)))
        elif names and what == "lose":
            lost = data.draw(st.sampled_from(names))
            del blocks.of[lost]
            rank.copies.drop([lost])
        elif what == "copy":
            rank.begin(**{name: list(own) for name, own in blocks.of.items()})
    own = {name: list(rows) for name, rows in blocks.of.items()}
    for name, numbers in rank.take(**own).items():
        assert numbers == [blocks.content[row] for row in own[name]][: len(numbers)]
