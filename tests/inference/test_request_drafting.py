"""A verifier's draft streams over real sockets, with a drafter that knows the next tokens."""

import threading
import time

import numpy as np
import pytest
import torch
import zmq
from msgspec.structs import replace

from refrain.engines.histospec.acceptance import Acceptance
from refrain.engines.histospec.budget import keep_likeliest
from refrain.engines.histospec.gate import Gate
from refrain.engines.inference.drafting.draft_link import decode_feedback, encode
from refrain.engines.inference.drafting.head_drafter import HiddenStates
from refrain.engines.inference.drafting.request_drafting import DraftedRow, RequestDrafting
from refrain.engines.specactor.streams import Drafted, DraftStream
from refrain.engines.specactor.text_drafters import TEXT_DRAFTERS
from refrain.schemas.counts import StreamCounts
from refrain.schemas.rollout import DraftSetting
from tests.sockets import free_port

ANY = 10**6
"""More draft tokens than are ever drafted."""
PROMPT = [5, 6, 7]
VOCAB_SIZE = 5000
COUPLED = DraftSetting("small", 3, coupled=True)
DECOUPLED = DraftSetting("small", 3, coupled=False)


class Oracle(threading.Thread):
    """A server like `VLLMDrafter`, whose drafts count up from the last token."""

    def __init__(self, port: int | None = None) -> None:
        """Serve on `port`, or on a free one."""
        super().__init__(daemon=True)
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.address = f"tcp://127.0.0.1:{port or free_port()}"
        self.socket.bind(self.address)
        self.streams: dict[str, DraftStream] = {}
        self.counts = StreamCounts()
        self.last: dict[str, int] = {}
        """Last verified token of each text."""
        self.sizes: list[int] = []
        """Bytes of each message."""
        self.num_fresh = 0
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stopped.is_set():
            if not self.socket.poll(20):
                continue
            verifier, message = self.socket.recv_multipart()
            feedback = decode_feedback(message)
            assert feedback
            self.num_fresh += feedback.fresh
            for id in feedback.closed:
                self.streams.pop(id).close()
            for opened in feedback.opened:
                self.streams[opened.id] = DraftStream(opened, self.counts)
                self.last[opened.id] = opened.token_ids[-1]
            for told in feedback.verified:
                self.streams[told.id].verified(told)
                self.last[told.id] = told.token_ids[-1]
            self.sizes.append(len(message))
            for id, stream in self.streams.items():
                while stream.wants:
                    token = (stream.ahead or [self.last[id]])[-1] + 1
                    drafted = stream.drafted(token, ended=False)
                    self.socket.send_multipart([verifier, encode([drafted])])

    def stop(self) -> None:
        self.stopped.set()
        self.join(5)
        self.socket.close()


def proposed(
    drafting: RequestDrafting, rows: list[DraftedRow], max_draft_tokens: int
) -> list[list[int]]:
    """Draft where the history has nothing, and verify at most `max_draft_tokens` tokens."""
    drafts = drafting.propose(rows, rows[-1].row + 1)
    probabilities = drafting._acceptance.of_drafts(drafts.evidence, drafts.num)
    kept = keep_likeliest(probabilities, drafts.num, max_draft_tokens)
    verified = [row[:num] for row, num in zip(drafts.tokens.tolist(), kept, strict=True)]
    drafting.verify(rows, verified)
    return [verified[row.row] for row in rows]


@pytest.fixture
def oracle():
    oracle = Oracle()
    yield oracle
    oracle.stop()


class Verifier:
    """One row of a batch. Its response counts up, except at the positions `odd`."""

    def __init__(
        self, setting: DraftSetting, odd: tuple[int, ...] = (), max_tokens: int = 60
    ) -> None:
        self.drafting = RequestDrafting(0, VOCAB_SIZE, Acceptance())
        self.drafting.begin("r", setting, sample_key=1, max_tokens=max_tokens)
        self.odd = odd
        self.text = list(PROMPT)

    def right(self) -> int:
        return 99 if len(self.text) in self.odd else self.text[-1] + 1

    def step(self, draft: list[int], wait_for: int = 0) -> list[int]:
        """Verify the draft. Return the draft of the next step.

        `wait_for`: wait until so many draft tokens have arrived.
        """
        before = len(self.text)
        for token in [*draft, None]:
            right = self.right()
            self.text.append(right)
            if right != token:
                break
        num_sampled = len(self.text) - before
        if not wait_for:
            return self.propose(num_sampled)
        self.propose(num_sampled, max_draft_tokens=0)
        deadline_s = time.monotonic() + 10
        while len(self.drafting._requests["r"].stream.pending) < wait_for:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
            self.propose(0)
        return self.propose(1)

    def propose(self, num_sampled: int, max_draft_tokens: int = ANY) -> list[int]:
        row = DraftedRow(0, "r", num_sampled, np.array(self.text, np.int32))
        return proposed(self.drafting, [row], max_draft_tokens)[0]


def test_a_request_waits_for_its_drafter_and_ends_without_it(oracle):
    """A drafter that was never connected gives no drafts, and its requests end as others do."""
    verifier = Verifier(COUPLED)
    assert verifier.step([]) == []
    assert verifier.step([]) == []
    verifier.drafting.begin("other", COUPLED, sample_key=2, max_tokens=60)
    other = DraftedRow(0, "other", 1, np.array(PROMPT, np.int32))
    assert proposed(verifier.drafting, [other], ANY) == [[]]
    verifier.drafting.end(["other"])
    verifier.drafting.connect({"small": oracle.address})
    assert len(verifier.step([], wait_for=3)) == 3


def test_a_drafter_computes_a_long_prompt_beside_its_verifier(oracle):
    """The drafter drafts during the verifier's prefill.

    If it guesses the first token, its drafts continue from the second one.
    """
    verifier = Verifier(DECOUPLED)
    verifier.drafting.connect({"small": oracle.address})
    assert verifier.propose(0) == []
    deadline_s = time.monotonic() + 10
    while len(verifier.drafting._requests["r"].stream.pending) < 5:
        assert time.monotonic() < deadline_s
        assert verifier.propose(0) == [], "no drafts before the prefill ends"
    assert verifier.step([]) == [9, 10, 11]
    assert verifier.step([9, 10, 11], wait_for=1)[:1] == [13]


@pytest.mark.parametrize("setting", [COUPLED, DECOUPLED])
def test_arrived_drafts_are_verified(oracle, setting):
    verifier = Verifier(setting)
    verifier.drafting.connect({"small": oracle.address})
    draft = verifier.step([], wait_for=3)
    for _ in range(4):
        assert draft == [verifier.text[-1] + 1 + i for i in range(3)]
        draft = verifier.step(draft, wait_for=3)
    assert verifier.drafting.progress() == {"r": (12, 12, 0)}


def test_a_message_is_as_long_as_what_is_new(oracle):
    verifier = Verifier(DECOUPLED, max_tokens=4000)
    verifier.drafting.connect({"small": oracle.address})
    draft = []
    for _ in range(600):
        draft = verifier.step(draft, wait_for=3)
    # The text is sent only once. A large position takes two bytes more.
    assert len(verifier.text) > 2000
    assert max(oracle.sizes[1:]) <= min(oracle.sizes[1:]) + 16


def test_a_wrong_draft_is_corrected(oracle):
    verifier = Verifier(COUPLED, odd=(6,))
    verifier.drafting.connect({"small": oracle.address})
    draft = verifier.step([], wait_for=3)
    draft = verifier.step(draft, wait_for=3)
    assert verifier.text[4:7] == [9, 10, 99][: len(verifier.text) - 4]
    assert draft == [100, 101, 102]
    assert oracle.counts.max_wasted == 1


def test_decoupled_drafts_come_when_they_come(oracle):
    verifier = Verifier(DECOUPLED)
    verifier.drafting.connect({"small": oracle.address})
    draft, num_drafted = [], 0
    for _ in range(20):
        draft = verifier.step(draft)
        assert len(draft) <= DECOUPLED.window
        num_drafted += len(draft)
        time.sleep(0.02)
    assert verifier.text == list(range(5, 5 + len(verifier.text)))
    assert num_drafted > 20


@pytest.mark.parametrize("setting", [COUPLED, DECOUPLED])
def test_a_silent_drafter_costs_no_wait(setting):
    """Requests of a silent drafter decode without drafts, so they do not slow down the batch."""
    silent = zmq.Context.instance().socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    verifier = Verifier(setting)
    verifier.drafting.connect({"small": f"tcp://127.0.0.1:{port}"})
    assert verifier.step([]) == []
    assert silent.poll(10_000), "the drafter did not receive the request"
    started_s = time.thread_time(), time.monotonic()
    for _ in range(50):
        assert verifier.step([]) == []
    working_s = time.thread_time() - started_s[0]
    assert time.monotonic() - started_s[1] < 1.0 + 10 * working_s
    silent.close()


def test_messages_that_cannot_be_read_or_be_right_are_passed_over():
    """Such messages give no draft and no error in an engine's step. A good one still counts."""
    drafter = zmq.Context.instance().socket(zmq.ROUTER)
    port = drafter.bind_to_random_port("tcp://127.0.0.1")
    verifier = Verifier(DECOUPLED)
    verifier.drafting.connect({"small": f"tcp://127.0.0.1:{port}"})
    assert verifier.step([]) == []
    name, message = drafter.recv_multipart()
    feedback = decode_feedback(message)
    assert feedback
    (opened,) = feedback.opened
    position = len(opened.token_ids)
    last = opened.token_ids[-1]
    right = [last + 1, last + 2, last + 3]
    good = Drafted("r", position, position, right)
    verifier.step([])
    for odd in (
        b"",
        b"\xc1",
        encode([["r"]]),
        encode([1, 2]),
        encode(good),
        encode([["r", position, position, [*right, "8"]]]),
        encode([replace(good, token_ids=[*right, -1])]),
        encode([replace(good, token_ids=[*right[:2], VOCAB_SIZE])]),
        encode([replace(good, start=-position)]),
        encode([replace(good, num_verified=-1)]),
        encode([replace(good, id="unknown")]),
    ):
        drafter.send_multipart([name, odd])
    time.sleep(0.1)
    assert verifier.step([]) == []
    start = len(verifier.text)
    drafter.send_multipart([name, encode([replace(good, num_verified=start, start=start)])])
    time.sleep(0.1)
    row = DraftedRow(0, "r", 0, np.array(verifier.text, np.int32))
    proposed(verifier.drafting, [row], ANY)
    assert verifier.drafting._requests["r"].stream.pending == right
    drafter.close()
    assert decode_feedback(b"\xc1") is None


def test_drafter_that_fell_behind_is_reopened():
    """The queue holds a thousand messages, and here there are more."""
    port = free_port()
    verifier = Verifier(DECOUPLED, max_tokens=10_000)
    verifier.drafting.connect({"small": f"tcp://127.0.0.1:{port}"})
    for _ in range(1200):
        assert verifier.step([]) == []
    late, draft = Oracle(port), []
    deadline_s = time.monotonic() + 10
    while not draft:
        assert time.monotonic() < deadline_s
        assert late.is_alive()
        time.sleep(0.05)
        draft = verifier.step(draft)
    assert draft == [verifier.text[-1] + 1 + i for i in range(len(draft))]
    late.stop()


def test_restarted_drafter_receives_all_requests(oracle):
    verifier = Verifier(COUPLED)
    verifier.drafting.connect({"small": oracle.address})
    draft = verifier.step(verifier.step([], wait_for=3), wait_for=3)
    other = Oracle()
    verifier.drafting.connect({"small": other.address})
    draft = verifier.step(draft, wait_for=3)
    assert draft == [verifier.text[-1] + 1 + i for i in range(3)]
    assert other.num_fresh == 1
    other.stop()


def test_streams_of_ended_requests_are_closed(oracle):
    """The drafter closes the stream of a request that has ended."""
    verifier = Verifier(COUPLED)
    verifier.drafting.connect({"small": oracle.address})
    verifier.step([])
    verifier.drafting.end(["r"])
    assert not verifier.drafting.knows("r")
    verifier.drafting.begin("s", COUPLED, sample_key=1, max_tokens=60)
    row = DraftedRow(0, "s", 1, np.array(PROMPT, np.int32))
    proposed(verifier.drafting, [row], ANY)
    deadline_s = time.monotonic() + 5
    while set(oracle.streams) != {"s"}:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_no_draft_goes_beyond_the_last_token(oracle):
    verifier = Verifier(COUPLED)
    verifier.drafting.begin("r", COUPLED, sample_key=1, max_tokens=6)
    verifier.drafting.connect({"small": oracle.address})
    assert len(verifier.step([], wait_for=1)) == 1
    assert oracle.counts.num_drafted == 1


def test_ngram_setting_drafts_from_the_own_text():
    drafting = RequestDrafting(0, VOCAB_SIZE, Acceptance())
    drafting.begin("r", DraftSetting("ngram", 4), sample_key=1, max_tokens=60)
    text = np.array([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], np.int32)
    assert proposed(drafting, [DraftedRow(0, "r", 1, text)], ANY) == [[4, 5, 6, 9]]
    longer = np.array([*text, 4, 5, 8], np.int32)
    proposed(drafting, [DraftedRow(0, "r", 3, longer)], ANY)
    assert drafting.progress() == {"r": (4, 2, 1)}
    drafting.end(["r"])
    assert not drafting.knows("r")


def test_drafts_that_are_dropped_count_as_none(oracle):
    """The n-gram drafter looks up its drafts again. Those of a model stay for the next step."""
    drafting = RequestDrafting(0, VOCAB_SIZE, Acceptance())
    drafting.connect({"small": oracle.address})
    drafting.begin("text", DraftSetting("ngram", 4), sample_key=1, max_tokens=60)
    drafting.begin("model", COUPLED, sample_key=1, max_tokens=60)
    text, counted = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3], [5, 6, 7]

    def step(num_sampled, *, max_draft_tokens=ANY):
        rows = [("text", text), ("model", counted)]
        return proposed(
            drafting,
            [
                DraftedRow(row, id, num_sampled, np.array(tokens, np.int32))
                for row, (id, tokens) in enumerate(rows)
            ],
            max_draft_tokens,
        )

    step(1)
    stream = drafting._requests["model"].stream
    deadline_s = time.monotonic() + 10
    while len(stream.pending) < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
        step(0)
    text.append(4)
    counted.append(8)
    assert step(1, max_draft_tokens=0) == [[], []]
    before = drafting.progress()
    text.append(5)
    counted.append(9)
    from_text, from_model = step(1)
    assert from_text == [6, 9, 1, 2]
    assert from_model == [10, 11, 12][: len(from_model)]
    assert from_model
    assert drafting.progress() == before


def test_tokens_teach_whether_a_draft_was_right_also_if_another_was_verified():
    drafting = RequestDrafting(0, VOCAB_SIZE, Acceptance())
    drafting.begin("r", DraftSetting("ngram", 4), sample_key=1, max_tokens=60)
    text, request = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3], drafting._requests["r"]

    def step(emitted: list[int], verified: list[int] | None = None) -> list[int]:
        text.extend(emitted)
        rows = [DraftedRow(0, "r", len(emitted) or 1, np.array(text, np.int32))]
        (draft,) = proposed(drafting, rows, ANY)
        if verified is not None:
            drafting.verify(rows, [verified])
        return draft

    assert step([], verified=[4, 5, 8, 8, 8]) == [4, 5, 6, 9]
    before = request.record.share
    # Two of its four tokens were verified, and the third was wrong.
    assert step([4, 5, 8, 1]) == []
    assert drafting.progress() == {"r": (2, 2, 0)}
    assert drafting._acceptance.num_observed == 3
    assert before < request.record.share < 2 / 3
    before = request.record.share
    assert step([2, 3], verified=[7]) == [4, 5, 8, 1]
    step([4])
    assert drafting.progress() == {"r": (2, 2, 0)}
    assert drafting._acceptance.num_observed == 4
    assert before < request.record.share


def test_request_starts_with_the_record_of_others():
    drafting = RequestDrafting(0, VOCAB_SIZE, Acceptance())
    worth = []
    for id in ("one", "other"):
        drafting.begin(id, DraftSetting("ngram", 4), sample_key=1, max_tokens=200)
        text, num_sampled = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3], 1
        for _ in range(8):
            drafts = drafting.propose(
                [DraftedRow(0, id, num_sampled, np.array(text, np.int32))], num_rows=1
            )
            worth.append(drafting._acceptance.of_drafts(drafts.evidence, drafts.num)[0, 0])
            draft = drafts.tokens[0, : drafts.num[0]].tolist()
            text += [*draft, 7]
            proposed(drafting, [DraftedRow(0, id, len(draft) + 1, np.array(text, np.int32))], 0)
            text += [1, 2, 3]
            num_sampled = 3
    assert worth[0] < worth[8]


def test_drafters_have_records_of_their_own(monkeypatch):
    """`constant` is always wrong, and `ngram` always right. Later requests begin with that."""
    monkeypatch.setitem(TEXT_DRAFTERS, "constant", Constant)
    drafting = RequestDrafting(0, VOCAB_SIZE, Acceptance())
    text, names = [1, 2, 3, 4] * 2, ("constant", "ngram")

    def worths() -> list[float]:
        rows = [DraftedRow(n, name, 1, np.array(text, np.int32)) for n, name in enumerate(names)]
        drafts = drafting.propose(rows, len(rows))
        return drafting._acceptance.of_drafts(drafts.evidence, drafts.num)[:, 0].tolist()

    for number in range(16):
        for name in names:
            drafting.begin(name, DraftSetting(name, 4), sample_key=1, max_tokens=400)
        constant, ngram = worths()
        assert number or constant == ngram
        for _ in range(8):
            text.append(text[-4])
            worths()
        drafting.end(names)
    assert constant < 0.3
    assert ngram > 0.8


def test_a_small_budget_goes_to_the_likeliest_token():
    """`long` has fewer of its draft tokens accepted, but more of its first ones."""
    drafting = RequestDrafting(0, VOCAB_SIZE, Acceptance())
    windows = {"short": 1, "long": 4}
    texts = {id: [1, 2, 3, 4, 5, 6, 9, 1, 2, 3] for id in windows}
    for id, window in windows.items():
        drafting.begin(id, DraftSetting("ngram", window), sample_key=1, max_tokens=400)

    def rows(num_sampled):
        return [
            DraftedRow(row, id, num_sampled[id], np.array(texts[id], np.int32))
            for row, id in enumerate(windows)
        ]

    def keep(budget):
        drafts = proposed(drafting, rows(dict.fromkeys(windows, 3)), budget)
        return dict(zip(windows, drafts, strict=True))

    for number in range(36):
        drafts = keep(ANY)
        num_right = {"long": 2, "short": number % 9 < 5}
        for id in windows:
            texts[id] += [*drafts[id][: num_right[id]], 100 + number]
        proposed(drafting, rows({id: num + 1 for id, num in num_right.items()}), 0)
        for text in texts.values():
            text += [1, 2, 3]
    assert drafting.progress() == {"long": (144, 72, 36), "short": (36, 20, 16)}
    assert {id: len(draft) for id, draft in keep(1).items()} == {"long": 1, "short": 0}


class Head:
    """A drafter of rows that counts up from the last token. `costly`: verification never pays."""

    def __init__(self, costly: bool) -> None:
        self.gate = Gate(Costly() if costly else None)

    def propose(self, rows, windows):
        assert all(row.num_sampled or not window for row, window in zip(rows, windows, strict=True))
        lasts = [int(row.text[-1]) for row in rows]
        return [
            list(range(last + 1, last + 1 + window))
            for last, window in zip(lasts, windows, strict=True)
        ]


class Costly:
    """Step times at which a draft token takes as long as ten steps."""

    def step_s(self, *given):
        return 1.0 + 10.0 * np.asarray(given[-1])


@pytest.mark.parametrize("costly", [False, True])
def test_a_head_drafts_where_it_pays(costly: bool):
    """It learns from its drafts in any case."""
    drafting = RequestDrafting(0, VOCAB_SIZE, Acceptance(), Head(costly))
    for id in "ab":
        drafting.begin(id, DraftSetting("head", 3), sample_key=1, max_tokens=60)
    text = np.array([1, 2, 3], np.int32)
    rows = [DraftedRow(0, "a", 1, text), DraftedRow(1, "b", 0, text)]
    assert proposed(drafting, rows, ANY) == [[] if costly else [4, 5, 6], []]
    before = drafting._requests["a"].record.share
    text = np.array([1, 2, 3, 4, 5], np.int32)
    proposed(drafting, [DraftedRow(0, "a", 2, text), rows[1]], ANY)
    assert drafting._requests["a"].record.share > before
    assert drafting.progress()["a"] == ((0, 0, 0) if costly else (3, 1, 1))


def test_a_head_continues_from_the_last_token_that_was_drawn():
    """Rows 0 to 2 are of a request with two drafts, row 3 of a plain one, 4 and 5 of one draft."""
    states = HiddenStates(torch.zeros(6, 1), np.array([3, 1, 2]))
    requests, num_sampled = np.array([0, 1, 2]), np.array([2, 1, 2])
    assert states.rows_after(requests, num_sampled).tolist() == [1, 3, 5]
    assert states.rows_after(requests[::2], num_sampled[1:]).tolist() == [0, 5]


class Constant:
    """A text drafter that always drafts the same tokens, and knows which requests it has."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def add(self) -> int:
        self.slots.append(max(self.slots, default=-1) + 1)
        return self.slots[-1]

    def remove(self, slot: int) -> None:
        self.slots.remove(slot)

    def propose(self, slots, token_ids, num_tokens, windows, drafts):
        assert set(slots.tolist()) <= set(self.slots)
        assert all(text[num - 1] > 0 for text, num in zip(token_ids, num_tokens, strict=True))
        for draft, window in zip(drafts, windows, strict=True):
            draft[:window] = 8
        return windows


def test_each_text_drafter_drafts_for_its_own_requests(monkeypatch):
    monkeypatch.setitem(TEXT_DRAFTERS, "constant", Constant)
    drafting = RequestDrafting(0, VOCAB_SIZE, Acceptance())
    for id, drafter in (("a", "constant"), ("b", "ngram"), ("c", "constant")):
        drafting.begin(id, DraftSetting(drafter, 2), sample_key=1, max_tokens=60)
    text = np.array([1, 2, 3, 1, 2], np.int32)
    rows = [DraftedRow(row, id, 1, text) for row, id in enumerate("abc")]
    assert proposed(drafting, rows, ANY) == [[8, 8], [3, 1], [8, 8]]
    constant = drafting._text_drafters["constant"]
    drafting.end("a")
    assert constant.slots == [1]
    assert proposed(drafting, rows[1:], ANY) == [[3, 1], [8, 8]]
