"""An engine's drafter against a model that is known: state follows requests, not rows."""

import json

import numpy as np
import pytest

from engines.histospec.acceptance import Acceptance
from engines.histospec.drafter import DraftedRequest, HistoryDrafter
from engines.histospec.drafting import NUM_EVIDENCE, IndexTable
from engines.histospec.gate import Gate
from engines.histospec.index import build_index
from engines.histospec.index_file import index_path, write_index
from engines.histospec.replay import replay
from engines.histospec.siblings import SiblingIndex
from engines.histospec.window import AIMD
from tests.histospec.test_gate import Linear

PROMPT = [50, 51, 52]
OLD = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 9, 9, 9, 4, 5, 6, 20, 21]]
KEYS = ["a" * 32, "b" * 32]
NEW = [[1, 2, 3, 4, 5, 6, 7, 8, 30, 10, 11, 12, 13], [1, 2, 3, 9, 9, 9, 4, 5, 6, 7, 8, 9, 10]]


@pytest.fixture
def drafter(tmp_path):
    for key in KEYS:
        write_index(build_index(PROMPT, OLD, [1.0, 0.5]), key, index_path(tmp_path, key))
    return HistoryDrafter(tmp_path, AIMD(), Gate(None), max_num_requests=4)


class Engine:
    """Generates what it is told to and verifies exactly."""

    def __init__(self, drafter, responses):
        self.drafter = drafter
        self.left = {id: list(tokens) for id, tokens in responses.items()}
        self.texts = {id: list(PROMPT) for id in responses}
        self.drafts = {id: [] for id in responses}
        self.num_passes = dict.fromkeys(responses, 0)
        self.num_drafted = dict.fromkeys(responses, 0)

    def step(self, ids, max_draft_tokens=10**6):
        num_sampled = np.array([self._advance(id) for id in ids], np.int32)
        ids = [id for id in ids if self.left[id]]
        num_sampled = num_sampled[: len(ids)] if len(ids) < len(num_sampled) else num_sampled
        self.drafter.end_others(ids)
        for id in ids:
            if not self.drafter.knows(id):
                key = KEYS[len(id) % 2]
                self.drafter.begin(DraftedRequest(id, key, len(self.texts[id]) + 40, len(PROMPT)))
        table = np.zeros((len(ids), 80), np.int32)
        for row, id in zip(table, ids, strict=True):
            row[: len(self.texts[id])] = self.texts[id]
        lengths = np.array([len(self.texts[id]) for id in ids], np.int32)
        if not ids:
            return
        places = self.drafter.places(ids)
        drafts = self.drafter.propose(places, num_sampled, table, lengths, max_draft_tokens)
        self.drafts.update(zip(ids, drafts, strict=True))

    def _advance(self, id):
        left, draft = self.left[id], self.drafts[id]
        accepted = 0
        while (
            accepted < len(draft) and accepted + 1 < len(left) and draft[accepted] == left[accepted]
        ):
            accepted += 1
        self.texts[id] += left[: accepted + 1]
        del left[: accepted + 1]
        self.num_passes[id] += 1
        self.num_drafted[id] += len(draft)
        return accepted + 1


def passes_of(response):
    table = IndexTable()
    slot = np.array([table.add(build_index(PROMPT, OLD, [1.0, 0.5]))], np.int32)
    # The prefill yields the first token, undrafted.
    return replay([[*PROMPT, response[0]]], [response[1:]], table.rows, slot, AIMD())


def test_rows_may_move_and_requests_may_join_late(drafter):
    engine = Engine(drafter, {"x": NEW[0], "yy": NEW[1]})
    orders = [["x"], ["x", "yy"], ["yy", "x"], ["x", "yy"]]
    step = 0
    while any(engine.left.values()):
        ids = [id for id in orders[min(step, 3)] if engine.left[id]]
        engine.step(ids)
        step += 1
    for id, response in zip(("x", "yy"), NEW, strict=True):
        expected = passes_of(response)
        assert engine.num_passes[id] == 1 + expected.num_passes[0]
        assert expected.num_passes[0] < len(response) - 3


def test_a_request_without_history_is_not_drafted_for(drafter, tmp_path):
    for key in KEYS:
        index_path(tmp_path, key).unlink()
    engine = Engine(drafter, {"x": NEW[0]})
    while engine.left["x"]:
        engine.step(["x"])
    assert engine.num_passes["x"] == len(NEW[0])
    counts = drafter.take_counts()
    assert counts.num_without_index == 1
    assert counts.num_drafting_steps == 0
    assert drafter.take_counts().num_steps == 0


def test_a_damaged_index_is_refused(drafter, tmp_path):
    path = index_path(tmp_path, KEYS[1])
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    engine = Engine(drafter, {"x": NEW[0]})
    engine.step(["x"])
    assert engine.drafts["x"] == []
    assert drafter.take_counts().num_damaged == 1


def test_all_drafts_together_stay_within_the_step(drafter):
    engine = Engine(drafter, {"x": NEW[0], "xyz": NEW[0]})
    engine.step(["x", "xyz"], max_draft_tokens=3)
    assert [len(engine.drafts[id]) for id in ("x", "xyz")] == [2, 1]


def test_a_draft_ends_where_the_response_must(drafter):
    drafter.begin(DraftedRequest("x", KEYS[0], max_tokens=len(PROMPT) + 2))
    table = np.array([[*PROMPT, 0, 0, 0]], np.int32)
    places = drafter.places(["x"])
    (draft,) = drafter.propose(places, np.array([1]), table, np.array([3], np.int32), 99)
    assert draft == [1]


def test_places_are_given_back(drafter):
    for n in range(40):
        drafter.begin(DraftedRequest(f"r{n}", KEYS[n % 2], 50))
        drafter.end_others([f"r{n}"])
    assert drafter.knows("r39")
    assert not drafter.knows("r38")


def test_siblings_draft_where_there_is_no_history(tmp_path):
    """Two samples with one answer: the second, a few tokens behind, follows the first."""
    drafter = HistoryDrafter(tmp_path, AIMD(), Gate(None), 4, SiblingIndex())
    answer = list(range(1, 21))
    engine = Engine(drafter, {"x": answer, "yyy": answer})
    for _ in range(12):
        engine.step(["x"])
    while engine.left["yyy"]:
        engine.step([id for id in ("x", "yyy") if engine.left[id]])
    assert engine.num_passes["x"] == len(answer)
    assert engine.num_passes["yyy"] < len(answer) // 2
    # Classes of their own: what history is worth is not learnt from siblings.
    changed = drafter.acceptance.by_class != Acceptance().by_class
    assert changed.any()
    assert not changed[:NUM_EVIDENCE].any()


def test_one_that_begins_with_what_it_learnt_drafts_alike(drafter, tmp_path):
    def made():
        return HistoryDrafter(tmp_path, AIMD(), Gate(Linear(token=0.4)), max_num_requests=4)

    def drafted(drafter):
        engine = Engine(drafter, {"r": NEW[0], "rs": NEW[1]})
        while any(engine.left.values()):
            engine.step([id for id in engine.left if engine.left[id]])
        drafter.end_others([])
        return engine.num_drafted

    del drafter  # Its files are wanted.
    first, second, fresh = made(), made(), made()
    for _ in range(40):
        drafted(first)
    second.restore(json.loads(json.dumps(first.state())))
    told = drafted(first)
    assert drafted(second) == told
    assert drafted(fresh) != told
    with pytest.raises(KeyError):
        second.restore({})
