"""The shared index: which responses it holds, how its files are merged, and what a lost file
costs."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.histospec.drafting import draft_batch_of_any, without_noise, without_turns
from refrain.engines.histospec.index import END, build_index
from refrain.engines.histospec.index_file import LIST, shared_dir
from refrain.engines.histospec.library import PromptHistory, delete_indexes
from refrain.engines.histospec.matching import IndexTable
from refrain.engines.histospec.shared import (
    MERGED,
    MOST_IN_ONE,
    Shard,
    SharedLibrary,
    SharedReader,
    num_merged,
)
from refrain.schemas.drafting import DraftingConfig
from tests.histospec.test_index import slow_draft

TOKENS = st.lists(st.integers(0, 2), max_size=14)
RESPONSES = st.lists(st.tuples(TOKENS, st.sampled_from([0.0, 0.1, 1.0])), max_size=4)


def history(step, number, num_responses=2):
    """Return a history whose responses no other prompt has."""
    answer = [100 * number + i for i in range(9)]
    rewards = [1.0] * num_responses
    return PromptHistory(f"{number:032x}", step, [7, 8], [answer] * num_responses, rewards)


def library(directory, epoch_steps=0, max_tokens=10_000):
    return SharedLibrary(directory, DraftingConfig(shared_tokens=max_tokens), epoch_steps)


def held(directory):
    """Return the numbers of the prompts in the files, once per response, and the number of refused
    files."""
    indexes, num_refused = SharedReader(directory).read()
    texts = [index.text for index in indexes.values()]
    text = np.concatenate(texts) if texts else np.zeros(0, np.int32)
    firsts = text[(text % 100 == 0) & (text != END)]
    return sorted((firsts // 100).tolist()), num_refused


def drafted(indexes, context, window):
    table = IndexTable()
    slots = np.array([table.add(index) for index in indexes], np.int32)
    drafts, evidence = np.zeros((1, 40), np.int32), np.zeros((1, 40), np.uint16)
    text = np.array([context], np.int32).reshape(1, len(context))
    args = (np.array([len(context)], np.int32), np.array([window], np.int32))
    args = (*args, without_noise(1), without_turns(1))
    (num,) = draft_batch_of_any(table.rows, slots, text, *args, drafts, evidence)
    return drafts[0, :num].tolist()


def longest(prompt, responses, context, least, most):
    """Return the length of the longest match, and its number of occurrences."""
    texts = [prompt[-most:] + tokens for tokens, _ in responses]
    for length in range(min(most, len(context)), least - 1, -1):
        pattern = context[len(context) - length :]
        num = sum(
            text[i : i + length] == pattern for text in texts for i in range(len(text) - length + 1)
        )
        if num:
            return length, num
    return 0, 0


@settings(max_examples=200, deadline=None)
@given(prompt=TOKENS, files=st.lists(RESPONSES, min_size=1, max_size=3), start=TOKENS)
def test_of_several_indexes_the_one_that_knows_most_drafts(prompt, files, start):
    """The index with the longest and most frequent match drafts, as a prompt's own index would."""
    indexes = [
        build_index(prompt, [t for t, _ in rows], [r for _, r in rows], min_match=2, max_draft=9)
        for rows in files
    ]
    for context in (prompt + start, start):
        known = [longest(prompt, rows, context, 2, 7) for rows in files]
        got = drafted(indexes, context, 5)
        best = known.index(max(known))
        if max(known)[0] == 0:
            assert got == []
        elif expected := slow_draft(prompt, files[best], context, 5, max(known)[0], 7):
            assert got == expected


@settings(max_examples=40, deadline=None)
@given(rewards=st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1e4]), min_size=1, max_size=5))
def test_weights_of_responses_are_those_they_were_built_with(rewards):
    texts = [[i, i + 1, i + 2] for i in range(len(rewards))]
    found = build_index([5, 6], texts, rewards).part_weights() * 2.0**-20
    assert found == pytest.approx(np.array(rewards) - min(0.0, *rewards), abs=2.0**-20)


def test_two_epochs_are_kept_and_nothing_twice(tmp_path):
    shared = library(tmp_path, epoch_steps=2)
    for step in range(1, 9):
        shared.add([history(step, step), history(step, 10 + step)])
        expected = [n for base in (0, 10) for n in range(base + max(1, step - 3), base + step + 1)]
        # The files are small, so each step merges them.
        assert held(tmp_path) == (sorted(2 * expected), 0)


def test_old_responses_are_not_added(tmp_path):
    shared = library(tmp_path, epoch_steps=2)
    shared.add([history(9, 1)])
    shared.add([history(4, 2), history(6, 3)])
    assert held(tmp_path)[0] == [1, 1, 3, 3]


def test_a_prompt_of_many_long_responses_leaves_room_for_others(tmp_path):
    """A file holds at most a fourth of 480 tokens. With 12 tokens per response, that leaves five
    responses for each prompt."""
    shared = library(tmp_path, max_tokens=480)
    shared.add([history(1, 1, num_responses=90), history(1, 2, num_responses=90)])
    assert held(tmp_path)[0] == [1] * 5 + [2] * 5


def test_files_keep_to_the_token_limit(tmp_path):
    shared = library(tmp_path, max_tokens=480)
    for step in range(1, 60):
        shared.add([history(step, step)])
        indexes, _ = SharedReader(tmp_path).read()
        assert sum(len(index.text) for index in indexes.values()) <= 480
    numbers = held(tmp_path)[0]
    assert max(numbers) == 59
    assert len(numbers) >= 480 / 12 / 2


@given(
    sizes=st.lists(st.integers(1, 10**6), max_size=12),
    num_new=st.integers(1, 10**6),
    most=st.integers(1, 10**7),
)
def test_only_the_last_files_of_about_its_size_are_merged(sizes, num_new, most):
    shards = [Shard(str(i), ((5, size),)) for i, size in enumerate(sizes)]
    num = num_merged(shards, num_new, since=0, most=most)
    merged, total = sizes[len(sizes) - num :], num_new
    for size in reversed(merged):
        assert size <= MERGED * total
        total += size
    assert total <= max(most, num_new)
    if num < len(sizes):
        assert sizes[-1 - num] > MERGED * total or total + sizes[-1 - num] > most


def test_each_token_is_written_a_few_times(tmp_path, monkeypatch):
    shared = library(tmp_path, max_tokens=10**7)
    num_written = 0
    write = SharedLibrary._write

    def count(self, parts, before):
        nonlocal num_written
        num_written += sum(len(part.text) for part in parts)
        write(self, parts, before)

    monkeypatch.setattr(SharedLibrary, "_write", count)
    for step in range(1, 201):
        shared.add([history(step, step)])
    assert num_written <= 16 * 200 * 24
    assert len(SharedReader(tmp_path).read()[0]) <= 5


def test_restart_continues_with_the_files(tmp_path):
    library(tmp_path).add([history(1, 1)])
    again = library(tmp_path)
    again.add([history(2, 2)])
    assert held(tmp_path) == ([1, 1, 2, 2], 0)
    assert len(list(shared_dir(tmp_path).glob("*.index"))) == 1


@pytest.mark.parametrize("loss", ["damaged", "deleted", "no list", "bad list"])
def test_a_loss_costs_what_was_lost(tmp_path, loss):
    shared = library(tmp_path)
    shared.add([history(1, 1)])
    (path,) = shared_dir(tmp_path).glob("*.index")
    (files,) = shared_dir(tmp_path).glob(f"*{LIST}")
    if loss == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    elif loss == "deleted":
        path.unlink()
    elif loss == "no list":
        files.unlink()
    else:
        files.write_text(json.dumps([{"name": 3}]))
    assert held(tmp_path) == ([], loss == "damaged")
    again = library(tmp_path)
    again.add([history(2, 2)])
    assert held(tmp_path) == ([2, 2], 0)


def test_reader_maps_new_files_when_they_appear(tmp_path):
    shared, reader = library(tmp_path), SharedReader(tmp_path)
    assert not reader.changed()
    shared.add([history(1, 1, num_responses=50)])
    assert reader.changed()
    (first,) = reader.read()[0].items()
    assert not reader.changed()
    shared.add([history(2, 2)])
    indexes, _ = reader.read()
    assert len(indexes) == 2
    assert indexes[first[0]] is first[1]


def test_libraries_of_several_workers_are_read_together(tmp_path):
    config = DraftingConfig(shared_tokens=1000)
    for share in range(2):
        SharedLibrary(tmp_path, config, share=share).add([history(1, share + 1)])
    assert held(tmp_path)[0] == [1, 1, 2, 2]


def test_none_is_written_where_none_is_wanted(tmp_path):
    library(tmp_path, max_tokens=0).add([history(1, 1)])
    assert list(tmp_path.iterdir()) == []


def test_shared_files_are_deleted_with_the_indexes(tmp_path):
    library(tmp_path / "history").add([history(1, 1)])
    delete_indexes(tmp_path / "history")
    assert list(tmp_path.iterdir()) == []


def test_single_file_keeps_to_its_part(tmp_path):
    shared = library(tmp_path, max_tokens=4000)
    for step in range(1, 120):
        shared.add([history(step, step)])
    indexes, _ = SharedReader(tmp_path).read()
    assert all(len(index.text) <= 4000 / MOST_IN_ONE for index in indexes.values())
