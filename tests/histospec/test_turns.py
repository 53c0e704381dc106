"""Conversations in the indexes: each turn is a part, and no observed token is drafted."""

from hashlib import sha256

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.histospec.drafter import DraftedRequest, HistoryDrafter
from refrain.engines.histospec.drafting import LONGEST_ALONE, draft_batch, without_noise
from refrain.engines.histospec.gate import Gate
from refrain.engines.histospec.index import build_index, split_turns
from refrain.engines.histospec.index_file import index_path, open_index, shared_dir
from refrain.engines.histospec.library import IndexLibrary, PromptHistory
from refrain.engines.histospec.matching import IndexTable
from refrain.engines.histospec.predicted_gain import ResponseGroup, predict_gain
from refrain.engines.histospec.refill import refill
from refrain.engines.histospec.shared import SharedLibrary
from refrain.engines.histospec.window import Fixed
from refrain.engines.histospec.worker import histories
from refrain.engines.store.tables import INDEXED
from refrain.schemas.drafting import DraftingConfig
from tests.histospec.test_index import slow_draft

KEYS = [f"{n:032x}" for n in range(2)]
TOKENS = st.lists(st.integers(0, 2), max_size=6)
TURNS = st.lists(st.tuples(TOKENS.filter(bool), TOKENS), max_size=3)


def told(conversation):
    """Return the tokens of a conversation, and the sizes of its turns."""
    tokens = [token for turn in conversation for part in turn for token in part]
    return tokens, [(len(sampled), len(observed)) for sampled, observed in conversation]


def marked(prompt, conversation):
    """Yield the tokens before each turn and those of the turn, as pairs of a token and whether it
    is before a later turn."""
    for number, parts in enumerate(split_turns(prompt, *told(conversation))):
        before, sampled = (part.tolist() for part in parts)
        yield [(token, number > 0) for token in before], [(token, False) for token in sampled]


def drafted(index, context, start, window):
    table = IndexTable()
    slot = table.add(index)
    drafts = np.zeros((1, window + 1), np.int32)
    (num,) = draft_batch(
        table.rows,
        np.array([slot], np.int32),
        np.array([context], np.int32).reshape(1, len(context)),
        np.array([len(context)], np.int32),
        np.array([window], np.int32),
        without_noise(1),
        np.array([start], np.int32),
        LONGEST_ALONE,
        drafts,
        np.zeros(drafts.shape, np.uint16),
    )
    return drafts[0, :num].tolist()


@settings(max_examples=120, deadline=None)
@given(
    prompt=TOKENS,
    responses=st.lists(st.tuples(TURNS, st.sampled_from([0.0, 0.1, 1.0])), max_size=4),
    asked=TURNS,
    window=st.integers(0, 9),
    match=st.sampled_from([(1, 3), (2, 16), (3, 7)]),
)
def test_index_with_turns_equals_brute_force(prompt, responses, asked, window, match):
    """Tokens before a later turn match those before another later turn, and are never drafted."""
    tokens, turns = (
        zip(*(told(own) for own, _ in responses), strict=True) if responses else ((), ())
    )
    rewards = [reward for _, reward in responses]
    sizes = dict(zip(("min_match", "max_match", "max_draft"), (*match, 9), strict=True))
    index = build_index(prompt, tokens, rewards, turns=turns, **sizes)
    parts = [
        (before[-match[1] :] + sampled, reward)
        for own, reward in responses
        for before, sampled in marked(prompt, own)
    ]
    for own in (asked, *(own for own, _ in responses)):
        for before, sampled in marked(prompt, own):
            start = len(before) if (True in dict(map(reversed, before))) else 0
            for num in range(len(sampled) + 1):
                context = before + sampled[:num]
                slow = slow_draft([], parts, context, window, *match, lambda pair: not pair[1])
                got = drafted(index, [token for token, _ in context], start, window)
                assert got == [token for token, _ in slow]


def test_histories_without_turns_have_the_files_that_they_always_had(tmp_path):
    """The checksums are of the version before conversations. With one turn each, they stay too."""
    rows = [
        {
            "prompt_key": KEYS[n // 3],
            "step": 4,
            "prompt_token_ids": [9 * i + n // 3 for i in range(20)],
            "response_token_ids": [(7 * i * n) % 50 for i in range(40 + n)],
            "reward": 0.25 * n,
        }
        for n in range(6)
    ]
    one_turn = [row | {"turns": [{"num_sampled": 40 + n}]} for n, row in enumerate(rows)]
    for name, table in (("none", rows), ("one", one_turn)):
        found = histories(pa.Table.from_pylist(table, INDEXED))
        IndexLibrary(tmp_path / name, DraftingConfig()).add(found)
        SharedLibrary(tmp_path / name, DraftingConfig()).add(found)
        files = [index_path(tmp_path / name, key).read_bytes() for key in KEYS]
        (shared,) = shared_dir(tmp_path / name).glob("*.index")
        files.append(b"".join(a.tobytes() for a in open_index(shared, shared.stem).arrays))
        assert [sha256(file).hexdigest()[:16] for file in files] == [
            "f9be5167f9cd46bb",
            "da5b0107418a8c6e",
            "2a724788d8807048",
        ]


PROMPT, END_OF_TURN, OPENING = [900, 901, 902, 903], 1, [800, 801, 802]
OBSERVED = 1000
"""Observed tokens are from here on, or in `OPENING`."""


def conversation(rng, noise):
    """Return three turns with the same beginning. Then the first turn chooses one of three texts,
    and the others follow from what was observed. A share `noise` of the tokens is random."""
    turns, seen = [], int(rng.integers(3))
    for number in range(3):
        text = [2, 3, 4, *range(100 * seen + 100, 100 * seen + 112)]
        sampled = [token if rng.random() > noise else int(rng.integers(600)) for token in text]
        seen = int(rng.integers(3))
        observed = [] if number == 2 else [OBSERVED + 10 * seen + i for i in range(4)] + OPENING
        turns.append(([*sampled, END_OF_TURN], observed))
    return turns


class Replayed:
    """Generates known conversations with a drafter, each turn as a request of its own."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.counts = np.zeros((3, 2), np.int64)
        """Drafted and accepted tokens of each turn."""
        self.offered = set()
        """All tokens that were drafted."""

    def run(self, key, name, conversation):
        parts = split_turns(PROMPT, *told(conversation))
        for number, (before, sampled) in enumerate(parts):
            start = len(before) if number else 0
            at, most = len(before), len(before) + 200
            request = DraftedRequest(f"{name}-{number}", key, most, turn_start=start)
            self.drafter.begin(request)
            self.counts[number] += self._turn(request.id, np.append(before, sampled), at)
            self.drafter.end_others([])

    def _turn(self, id, tokens, at):
        """Generate the tokens from `at` on, the first one by the prefill."""
        num_sampled, counts, row = 1, np.zeros(2, np.int64), np.zeros((1, 300), np.int32)
        row[0, : len(tokens)] = tokens
        places = self.drafter.places([id])
        while (at := at + num_sampled) < len(tokens):
            given = np.array([num_sampled], np.int32), row.copy(), np.array([at], np.int32)
            given[1][0, at:] = 0
            (draft,) = self.drafter.propose(places, *given, 10**6)
            self.offered.update(draft)
            right = [a == b for a, b in zip(draft, tokens[at:], strict=False)]
            accepted = right.index(False) if False in right else len(right)
            counts += len(draft), accepted
            num_sampled = accepted + 1
        return counts


def epoch(rng, noise=0.05):
    return {key: [conversation(rng, noise) for _ in range(8)] for key in KEYS}


def history_of(key, conversations, *, with_turns=True):
    tokens, turns = zip(*map(told, conversations), strict=True)
    rewards = [1.0] * len(tokens)
    return PromptHistory(key, 1, PROMPT, tokens, rewards, turns if with_turns else ())


def replayed(directory, known, again, **options):
    """Replay conversations with drafts from known ones."""
    found = [history_of(key, of, **options) for key, of in known.items()]
    IndexLibrary(directory, DraftingConfig()).add(found)
    SharedLibrary(directory, DraftingConfig()).add(found)
    drafter = HistoryDrafter(directory, Fixed(8), Gate(None), 4)
    drafter.expect(KEYS)
    drafter.settle()
    engine = Replayed(drafter)
    for key, of in again.items():
        for number, one in enumerate(of):
            engine.run(key, f"{key}-{number}", one)
    return engine


def is_observed(tokens):
    return {token for token in tokens if token >= OBSERVED or token in OPENING}


def test_later_turns_are_accepted_as_well_and_nothing_observed_is_drafted(tmp_path):
    rng = np.random.default_rng(0)
    known, again = epoch(rng), epoch(rng)
    engine = replayed(tmp_path / "turns", known, again)
    assert is_observed(engine.offered) == set()
    assert engine.counts[:, 0].min() > 200, "must draft in every turn"
    first, *later = (accepted / num for num, accepted in engine.counts)
    assert min(later) >= first > 0.5
    # Without turns in the history, drafts go on into what was observed.
    without = replayed(tmp_path / "none", known, again, with_turns=False)
    assert is_observed(without.offered)
    assert without.counts[1, 1] / without.counts[1, 0] < later[0] - 0.1


def test_a_turn_begins_with_the_draft_for_its_observation(tmp_path):
    """The tokens before a turn say which of its beginnings to draft."""
    beginnings = {0: [5, 6, 7, END_OF_TURN], 1: [5, 8, 9, END_OF_TURN]}
    known = [
        [([3, 4, END_OF_TURN], [OBSERVED + seen, *OPENING]), (turn, [])]
        for seen, turn in beginnings.items()
    ]
    IndexLibrary(tmp_path, DraftingConfig()).add([history_of(KEYS[0], known)])
    index = open_index(index_path(tmp_path, KEYS[0]), KEYS[0])
    for seen, turn in beginnings.items():
        before = [*PROMPT, 40, END_OF_TURN, OBSERVED + seen, *OPENING]
        for num in range(3):
            got = drafted(index, before + turn[:num], len(before), 9)
            assert got == turn[num:]


def test_the_device_drafts_no_observed_token_either():
    """It finds a place by the tokens of the turn alone."""
    known = epoch(np.random.default_rng(2))[KEYS[0]]
    tokens, turns = zip(*map(told, known), strict=True)
    table = IndexTable()
    slot = table.add(build_index(PROMPT, tokens, [0.0] * 8, turns=turns, min_match=2))
    context = np.concatenate([PROMPT, tokens[0]]).astype(np.int32)
    rows = np.tile(context, (len(context), 1))
    drafts = np.zeros((len(rows), 8), np.int32)
    ends, windows = np.arange(len(rows), dtype=np.int32), np.full(len(rows), 8, np.int32)
    refill(table.rows, np.full((len(rows), 1), slot, np.int32), rows, ends, windows, drafts)
    assert np.count_nonzero(drafts) > len(rows)
    assert is_observed(set(drafts.ravel().tolist())) == set()


@pytest.mark.parametrize("with_turns", [True, False])
def test_the_predicted_gain_counts_sampled_tokens(with_turns):
    """Observed tokens never repeat here, while each sampled token is in the first half."""
    counter = iter(range(OBSERVED, 10**6))
    known = [
        [([*range(20 * i, 20 * i + 20)], [next(counter) for _ in range(40)]) for i in range(3)]
        for _ in range(8)
    ]
    tokens, turns = zip(*map(told, known), strict=True)
    own = turns if with_turns else ()
    group = ResponseGroup(np.array(PROMPT), list(map(np.array, tokens)), [*range(8)], own)
    found = predict_gain([group], DraftingConfig(look_ahead=False, gate=False))
    assert found is not None
    assert (found.where_cheap > 2.0) is with_turns
