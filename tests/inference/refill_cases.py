"""Draft for random rows with the kernels, and compare with what the definition drafts.

Run `python -m tests.inference.refill_cases` with TRITON_INTERPRET=1.
"""

from collections import Counter

import numpy as np
import torch

from refrain.engines.histospec.index import END, HistoryIndex, build_index
from refrain.engines.histospec.matching import IndexTable
from refrain.engines.histospec.refill import refill
from refrain.engines.inference.drafting.refill_kernel import refill_on_device

NUM_ROWS, MAX_DRAFT = 360, 16
MATCHES = ((1, 1), (3, 7), (2, 8), (1, 4))


class Histories:
    """Indexes as the definition and the kernels read them."""

    def __init__(self, indexes: list[HistoryIndex | None]) -> None:
        self.table = IndexTable()
        rows, parts, start = [], [np.full(3, 77, np.int32)], 3
        for index in indexes:
            index = index or build_index([], [], [])
            self.table.add(index)
            n = len(index.text)
            rows.append([start, start + n + 2, n])
            # Between the arrays lie tokens that occur in the texts.
            parts += [index.text, np.ones(2, np.int32), index.order, np.ones(3, np.int32)]
            start += 2 * n + 5
        self.arena = torch.from_numpy(np.concatenate(parts))
        self.rows = torch.tensor(rows, dtype=torch.int64)


class Rows:
    """Rows of a batch. Those of one request have the same text, and some have sampled nothing."""

    def __init__(self, slots: np.ndarray, texts: list[np.ndarray], requests: np.ndarray) -> None:
        self.slots, self.requests = slots, requests
        self.num_tokens = np.array([len(text) for text in texts], np.int32)
        self.text = np.ones((len(texts), self.num_tokens.max() + 2), np.int32)
        for row, text in zip(self.text, texts, strict=True):
            row[: len(text)] = text
        self.num_sampled = np.ones(len(requests), np.int32)

    def by_definition(self, histories: Histories, window: int) -> np.ndarray:
        drafts = np.zeros((len(self.requests), window), np.int32)
        refill(
            histories.table.rows,
            self.slots[self.requests],
            self.text[self.requests],
            self.num_tokens[self.requests],
            np.where(self.num_sampled > 0, window, 0).astype(np.int32),
            drafts,
        )
        return drafts

    def by_kernels(self, histories: Histories, window: int, matches: tuple[int, int]) -> np.ndarray:
        # The drafts are columns of a wider array.
        wide = torch.full((len(self.requests), window + 2), -5, dtype=torch.int64)
        refill_on_device(
            histories.arena,
            histories.rows,
            torch.from_numpy(self.slots),
            torch.from_numpy(self.requests),
            torch.from_numpy(self.num_sampled),
            torch.from_numpy(self.text),
            torch.from_numpy(self.num_tokens),
            wide[:, :window],
            *matches,
        )
        assert (wide[:, window:] == -5).all()
        return wide[:, :window].numpy()


def random_index(random: np.random.Generator, matches: tuple[int, int]) -> HistoryIndex | None:
    kind = random.random()
    if kind < 0.15:
        return None
    most = random.integers(1, 4) if kind < 0.6 else random.integers(2, 30)
    length = 300 if kind > 0.85 else 25
    responses = [random.integers(1, most + 1, random.integers(0, length)) for _ in range(6)]
    responses += responses[:2]
    prompt = random.integers(1, 4, 4)
    least, longest = matches
    rewards = [0.0] * len(responses)
    return build_index(
        prompt, responses, rewards, min_match=least, max_match=longest, max_draft=MAX_DRAFT
    )


def random_text(random: np.random.Generator, indexes: list[HistoryIndex | None]) -> np.ndarray:
    """Return random tokens, or some of a history, often the last ones of a response.

    Some texts have the end of a response in them. No text of a model has, but then too the kernels
    and the definition agree.
    """
    index = indexes[random.integers(len(indexes))]
    if index is None or random.random() < 0.3:
        return random.integers(1, 4, random.integers(1, 12))
    stop = int(random.integers(len(index.text)))
    if random.random() < 0.3:
        stop = int(random.choice(np.flatnonzero(index.text == END)))
    text = index.text[max(0, stop - 12) : stop]
    if random.random() < 0.15:
        return np.append(index.text[max(0, stop - 5) : stop + 1], random.integers(1, 3, stop % 3))
    return np.append(random.integers(1, 4, 2), text[text != END])


def compare(random: np.random.Generator, seen: Counter) -> None:
    """Draft for a batch, and count what its rows have in common with others."""
    matches = MATCHES[random.integers(len(MATCHES))]
    indexes = [random_index(random, matches) for _ in range(4)]
    # Two equal indexes tie.
    indexes.append(indexes[0])
    histories = Histories(indexes)
    num_requests, num_indexes = int(random.integers(2, 9)), int(random.integers(1, 4))
    slots = random.integers(-1, len(indexes), (num_requests, num_indexes)).astype(np.int32)
    texts = [random_text(random, indexes) for _ in range(num_requests)]
    num_rows = int(random.integers(4, 13))
    rows = Rows(slots, texts, random.integers(0, num_requests, num_rows))
    rows.num_sampled = random.integers(0, 5, num_rows).astype(np.int32)
    window = int(random.integers(1, MAX_DRAFT + 1))
    expected = rows.by_definition(histories, window)
    drafts = rows.by_kernels(histories, window, matches)
    assert (drafts == expected).all(), (drafts, expected)
    num_drafted = (expected > 0).sum(axis=1)
    seen["rows"] += num_rows
    seen["sampled nothing"] += int((rows.num_sampled == 0).sum())
    seen["no match"] += int(((num_drafted == 0) & (rows.num_sampled > 0)).sum())
    seen["full"] += int((num_drafted == window).sum())
    seen["cut short"] += int(((num_drafted > 0) & (num_drafted < window)).sum())


def long_history(random: np.random.Generator) -> None:
    """Compare in a history that takes several rounds, with matches too many for registers."""
    responses = [random.integers(1, 3, 400) for _ in range(15)]
    index = build_index([1, 2], responses, [0.0] * 15, min_match=3, max_match=7)
    histories = Histories([index, None])
    texts = [response[:stop] for response in responses for stop in (3, 40)]
    rows = Rows(np.array([[1, -1, 0]] * 30, np.int32), texts, np.arange(30))
    expected = rows.by_definition(histories, 12)
    assert (expected > 0).sum() > 300
    assert (rows.by_kernels(histories, 12, (3, 7)) == expected).all()


def ends() -> None:
    """Nothing crosses the end of a response, and nothing is read after the end of a text, where the
    arena has ones."""
    many = build_index([9], [[1, 2, 3, 4]] * 100, [0.0] * 100, min_match=3, max_match=7)
    once = build_index([9], [[1, 2, 3]], [0.0], min_match=3, max_match=7)
    other = build_index([1, 1], [[5], [6]], [0.0] * 2, min_match=3, max_match=7)
    histories = Histories([many, once, other])
    texts = [[1, 2, 3], [1, 1, 5], [1, 2, 3, END], [3, END, 1, 1]]
    slots = np.array([[0, -1], [2, -1], [1, -1], [1, 2]], np.int32)
    rows = Rows(slots, [np.array(text) for text in texts], np.arange(4))
    expected = [[4, 0, 0], [0, 0, 0], [0, 0, 0], [6, 0, 0]]
    assert rows.by_definition(histories, 3).tolist() == expected
    assert rows.by_kernels(histories, 3, (3, 7)).tolist() == expected


def negative_control() -> None:
    """The draft follows the majority, and a text or an order that differs gives another one."""
    responses = [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 3, 6, 8]]
    index = build_index([9], responses, [0.0] * 3, min_match=3, max_match=7)
    histories = Histories([index])
    rows = Rows(np.zeros((1, 1), np.int32), [np.array([5, 1, 2, 3])], np.zeros(1, np.int64))
    assert rows.by_kernels(histories, 3, (3, 7)).tolist() == [[6, 8, 0]]
    rows.text[0, 1] = 4
    assert rows.by_kernels(histories, 3, (3, 7)).tolist() == [[0, 0, 0]]
    rows.text[0, 1] = 1
    start, n = histories.rows[0, 1:]
    histories.arena[start : start + n] = histories.arena[start : start + n].flip(0)
    assert rows.by_kernels(histories, 3, (3, 7)).tolist() != [[6, 8, 0]]


def main() -> None:
    random, seen = np.random.default_rng(0), Counter()
    while seen["rows"] < NUM_ROWS:
        compare(random, seen)
    assert all(seen[kind] > 25 for kind in ("sampled nothing", "no match", "full", "cut short")), (
        seen
    )
    long_history(random)
    ends()
    print("drafted for", NUM_ROWS)
    negative_control()
    print("rejected other drafts")


if __name__ == "__main__":
    main()
