"""The drafter with an engine that generates known tokens: its state belongs to requests, not to
rows of the batch."""

import json
import threading
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch

from refrain.engines.histospec import drafter as drafter_module
from refrain.engines.histospec.acceptance import Acceptance, record_evidence
from refrain.engines.histospec.drafter import DraftedRequest, Drafts, HistoryDrafter
from refrain.engines.histospec.drafting import NUM_EVIDENCE, draft_batch_of_any
from refrain.engines.histospec.gate import Gate
from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import index_path, write_index
from refrain.engines.histospec.library import PromptHistory
from refrain.engines.histospec.matching import IndexTable
from refrain.engines.histospec.replay import replay
from refrain.engines.histospec.shared import SharedLibrary
from refrain.engines.histospec.window import AIMD, Fixed
from refrain.engines.inference.sampling.noise import perturbed_argmax
from refrain.schemas.drafting import DraftingConfig
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
    """Generates given responses and verifies drafts exactly."""

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
                self.drafter.begin(DraftedRequest(id, key, len(self.texts[id]) + 500))
        table = np.zeros((len(ids), 600), np.int32)
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
    counts = drafter.take_counts()
    assert (counts.num_with_index, counts.num_without_index) == (2, 0)


def test_a_step_without_room_for_drafts_does_not_look(drafter):
    engine = Engine(drafter, {"r": NEW[0]})
    learnt = []
    for room in (100, 0):
        engine.step(["r"], max_draft_tokens=room)
        drafter.gate.proposed(1, 1.0)
        learnt.append(drafter.gate.draft_times.per_row_s)
    assert len(learnt[0]) == len(learnt[1]) == 1


def others_of(rows, record):
    """Return the drafts of another drafter, whose last tokens were right as often as `record`."""
    others = Drafts.none(len(rows), max(map(len, rows)))
    for n, tokens in enumerate(rows):
        others.num[n], others.tokens[n, : len(tokens)] = len(tokens), tokens
    others.evidence[:] = record_evidence(np.array(record))
    return others


@pytest.fixture
def three_rows(drafter):
    """Return the arguments of `propose` for three alike requests, and what history drafts."""
    ids = ("a", "b", "c")
    for id in ids:
        drafter.begin(DraftedRequest(id, KEYS[0], 600))
    drafter.settle()
    table = np.tile([*PROMPT, 1, 2, 3], (3, 1)).astype(np.int32)
    rows = (drafter.places(ids), np.ones(3, np.int32), table, np.full(3, 6, np.int32))
    drafts = drafter.propose(*rows, 100)
    assert drafts[0] == drafts[1] == drafts[2] != []
    return rows, drafts[0]


def test_the_better_draft_is_verified(drafter, three_rows):
    """Other drafters' tokens are verified where more of them are expected to be accepted, or where
    they extend the draft from history."""
    rows, own = three_rows
    wrong, longer = [70 + token for token in range(40)], [*own, *range(80, 110)]
    for record, expected in ((1.0, [own, wrong, longer]), (0.0, [own, own, longer])):
        others = others_of([[], wrong, longer], record)
        assert drafter.propose(*rows, 100, others) == expected
    assert drafter.propose(*rows, 0, others_of([[], wrong, longer], 1.0)) == [[], [], []]
    counts = drafter.take_counts()
    assert (counts.num_steps, counts.num_drafting_steps) == (4, 3)


def test_drafts_of_others_count_as_drafting(drafter):
    drafter.begin(DraftedRequest("x", "", 600))
    rows = (drafter.places(["x"]), np.array([1]), np.array([PROMPT], np.int32), np.array([3]))
    assert drafter.propose(*rows, 100, others_of([[1, 2]], 0.1)) == [[1, 2]]
    assert drafter.take_counts().num_drafting_steps == 1


def test_a_tight_step_verifies_the_likeliest_tokens_of_all_drafters(drafter, three_rows):
    rows, own = three_rows
    first, other, last = drafter.propose(*rows, 6, others_of([[], [70] * 40, []], 0.5))
    assert first == last == own[: len(first)] != []
    assert other == [70] * (6 - 2 * len(first)) != []
    sure = others_of([[], [70] * 40, []], 1.0)
    assert drafter.propose(*rows, 6, sure) == [[], [70] * 6, []]


@pytest.mark.parametrize(("record", "num_rows"), [(0.0, 3), (1.0, 1)])
def test_history_learns_where_its_draft_was_the_better_one(drafter, three_rows, record, num_rows):
    """Row `a` has only the draft from history. Another drafter has other tokens for `b`, and
    extends the draft of `c`."""
    rows, own = three_rows
    drafter.propose(*rows, 100, others_of([[], [70] * 40, [*own, *range(80, 110)]], record))
    before, num_before = drafter.acceptance.by_class.copy(), drafter.acceptance.num_observed
    drafter.propose(rows[0], np.full(3, len(own) + 1, np.int32), *rows[2:], 0)
    learnt = np.flatnonzero(drafter.acceptance.by_class != before)
    assert set(learnt) == set(drafter._evidence[rows[0][0], : len(own)])
    assert drafter.acceptance.num_observed == num_before + num_rows * len(own)


def test_a_request_without_history_is_not_drafted_for(drafter, tmp_path):
    for key in KEYS:
        index_path(tmp_path, key).unlink()
    engine = Engine(drafter, {"x": NEW[0]})
    while engine.left["x"]:
        engine.step(["x"])
    assert engine.num_passes["x"] == len(NEW[0])
    counts = drafter.take_counts()
    assert (counts.num_with_index, counts.num_without_index) == (0, 1)
    assert counts.num_drafting_steps == 0
    assert drafter.take_counts().num_steps == 0


def test_a_damaged_index_is_refused(drafter, tmp_path):
    path = index_path(tmp_path, KEYS[1])
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    engine = Engine(drafter, {"x": NEW[0]})
    engine.step(["x"])
    assert engine.drafts["x"] == []
    assert drafter.take_counts().num_damaged == 1


def test_drafts_stay_within_the_step_budget(drafter):
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


def test_restored_drafter_drafts_alike(drafter, tmp_path):
    def made():
        return HistoryDrafter(tmp_path, AIMD(), Gate(Linear(token=0.4)), max_num_requests=4)

    def drafted(drafter):
        engine = Engine(drafter, {"r": NEW[0], "rs": NEW[1]})
        while any(engine.left.values()):
            engine.step([id for id in engine.left if engine.left[id]])
        drafter.end_others([])
        return engine.num_drafted

    del drafter  # The fixture has written the files.
    first, second, fresh = made(), made(), made()
    for _ in range(40):
        drafted(first)
    second.restore(json.loads(json.dumps(first.state())))
    told = drafted(first)
    assert drafted(second) == told
    assert drafted(fresh) != told
    with pytest.raises(KeyError):
        second.restore({})


def shared_by_all(directory, responses, **config):
    SharedLibrary(directory, DraftingConfig(**config)).add(
        [PromptHistory("c" * 32, 1, PROMPT, responses, [1.0] * len(responses))]
    )


def test_others_draft_where_a_prompt_has_no_history(tmp_path):
    shared_by_all(tmp_path, [NEW[0], NEW[0]])
    drafter = HistoryDrafter(tmp_path, AIMD(), Gate(None), 4)
    drafter.expect([KEYS[1]])
    drafter.settle()
    engine = Engine(drafter, {"x": NEW[0]})
    while engine.left["x"]:
        engine.step(["x"])
    assert engine.num_passes["x"] < len(NEW[0]) // 2
    counts = drafter.take_counts()
    # The last pass of a request is not counted, because the request has ended.
    assert 0 < counts.num_shared_draft_tokens < engine.num_drafted["x"]
    assert counts.num_shared_accepted_tokens == counts.num_shared_draft_tokens
    # The shared index and a prompt's own history have separate classes.
    changed = drafter.acceptance.by_class != Acceptance().by_class
    assert changed[NUM_EVIDENCE:].any()
    assert not changed[:NUM_EVIDENCE].any()


def test_none_of_it_where_prompts_share_nothing(tmp_path):
    shared_by_all(tmp_path, [NEW[0], NEW[0]])
    drafter = HistoryDrafter(tmp_path, AIMD(), Gate(None), 4, shares=False)
    drafter.expect([KEYS[1]])
    drafter.settle()
    engine = Engine(drafter, {"x": NEW[0]})
    while engine.left["x"]:
        engine.step(["x"])
    assert engine.num_passes["x"] == len(NEW[0])


def test_bad_shared_index_is_queried_less_often(tmp_path, monkeypatch):
    """After each two tokens, the prompt's own history has the right next token, and the shared
    index always a wrong one."""
    response = list(range(1, 400))
    known = [response[i : i + 3] for i in range(len(response))]
    index = build_index([], known, [1.0] * len(known), min_match=2)
    write_index(index, KEYS[1], index_path(tmp_path, KEYS[1]))
    shared_by_all(tmp_path, [[*pair, 0] for pair in pairwise(response)])
    asked = []
    monkeypatch.setattr(
        drafter_module,
        "draft_batch_of_any",
        lambda *args: asked.append(1) or draft_batch_of_any(*args),
    )
    drafter = HistoryDrafter(tmp_path, Fixed(16), Gate(None), 4)
    drafter.expect([KEYS[1]])
    drafter.settle()
    engine = Engine(drafter, {"x": response})
    while engine.left["x"]:
        engine.step(["x"])
    assert engine.num_passes["x"] == pytest.approx(len(response) / 2, abs=3)
    assert 4 <= len(asked) < engine.num_passes["x"] / 10
    counts = drafter.take_counts()
    assert counts.num_shared_draft_tokens < 10
    assert json.dumps(asdict(counts)), "the counts are not plain numbers"


def test_a_request_begins_before_its_index_is_open(tmp_path):
    """While the opening thread is busy, steps run without drafts. Later steps draft."""
    write_index(build_index(PROMPT, OLD, [1.0, 0.5]), KEYS[1], index_path(tmp_path, KEYS[1]))
    drafter = HistoryDrafter(tmp_path, AIMD(), Gate(None), 4)
    busy = threading.Event()
    loader = drafter.indexes._loader
    loader._thread.submit(busy.wait, 60)
    drafter.expect([KEYS[1]])
    engine = Engine(drafter, {"x": NEW[0]})
    engine.step(["x"])
    engine.step(["x"])
    assert engine.num_drafted["x"] == 0
    busy.set()
    drafter.settle()
    engine.step(["x"])
    engine.step(["x"])
    assert engine.num_drafted["x"] > 0


def test_drafter_predicts_the_token_a_sample_draws(tmp_path):
    """Ten continuations are equally frequent. The noise of each sample determines which one it
    draws, so a drafter that knows the sample key drafts it."""
    rng, tokens = np.random.default_rng(0), np.arange(20)
    responses = [[1, 2, 3, int(token), 4, 5] for token in np.repeat(tokens[10:20], 8)]
    write_index(build_index(PROMPT, responses, [1.0] * 80), KEYS[0], index_path(tmp_path, KEYS[0]))
    text = np.array([[*PROMPT, 1, 2, 3]], np.int32)
    num_right = {True: 0, False: 0}
    for n, sample_key in enumerate(rng.integers(-(2**62), 2**62, 200).tolist()):
        logits = torch.full((1, 20), -torch.inf)
        logits[0, 10:] = 0.0
        noise_of = (torch.tensor([sample_key]), torch.tensor([text.shape[1]]))
        drawn = int(perturbed_argmax(logits, *noise_of)[0])
        for foresees in num_right:
            drafter = HistoryDrafter(tmp_path, AIMD(), Gate(None), 1)
            key = {"sample_key": sample_key} if foresees else {}
            drafter.begin(DraftedRequest(f"{n}", KEYS[0], 99, **key))
            lengths = np.array([text.shape[1]], np.int32)
            (draft,) = drafter.propose(drafter.places([f"{n}"]), np.array([1]), text, lengths, 99)
            num_right[foresees] += draft[0] == drawn
    assert num_right[True] == 200
    assert num_right[False] < 60


def test_unused_opened_index_is_not_reused_next_epoch(tmp_path):
    path = index_path(tmp_path, KEYS[1])
    drafter = HistoryDrafter(tmp_path, AIMD(), Gate(None), 4)
    for responses in (OLD, [NEW[0]]):
        write_index(build_index(PROMPT, responses, [1.0] * len(responses)), KEYS[1], path)
        drafter.expect([KEYS[1]])
        drafter.settle()
    engine = Engine(drafter, {"x": NEW[0]})
    while engine.left["x"]:
        engine.step(["x"])
    assert engine.num_passes["x"] <= 5, "drafted from the index of the last epoch"


def test_samples_submitted_later_draft_from_what_is_open(tmp_path):
    write_index(build_index(PROMPT, OLD, [1.0, 0.5]), KEYS[1], index_path(tmp_path, KEYS[1]))
    drafter = HistoryDrafter(tmp_path, AIMD(), Gate(None), 4)
    for id in ("x", "xyz"):
        drafter.expect([KEYS[1]])
        drafter.settle()
        drafter.begin(DraftedRequest(id, KEYS[1], 50))
    assert not drafter.indexes._loader._ahead
