"""A response ends with the token that completes a stop string, however many arrive at once."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.inference.engine.stopping import StopStrings
from tests.conftest import DEMO

VOCABULARY = [b"a", b"b", b" ", b" a", b"ab", b"ba b", b"\xc3", b"\xa9", b"\xc3\xa9a", b"b\xc3"]
"""Tokens of a byte-level tokenizer. Some are only a part of a character."""
PIECES = ["a", "b", " ", " a", "ab", " b", " ab", "é"]
"""Tokens of a tokenizer whose decoding drops a leading space of the first token."""


def of_bytes(tokens: Sequence[int]) -> str:
    return b"".join(VOCABULARY[t] for t in tokens).decode(errors="replace")


def of_pieces(tokens: Sequence[int]) -> str:
    return "".join(PIECES[t] for t in tokens).removeprefix(" ")


def first_end(decode: Callable, strings: Sequence[str], tokens: Sequence[int]) -> int | None:
    """Return the number of tokens until the text contains one of the strings, by definition."""
    ends = range(1, len(tokens) + 1)
    return next((n for n in ends if any(s in decode(tokens[:n]) for s in strings)), None)


def found_in_parts(stops: StopStrings, tokens: Sequence[int], cuts: Sequence[int]) -> int | None:
    """Return the same with `StopStrings`, for tokens that arrive in parts.

    Each part sees only `num_tokens_before` tokens before it.
    """
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for begin, end in pairwise(bounds):
        before = tokens[max(0, begin - stops.num_tokens_before) : begin]
        kept = stops.num_kept(before, tokens[begin:end])
        if kept is not None:
            return begin + kept
    return None


@pytest.mark.parametrize(
    ("decode", "size"), [(of_bytes, len(VOCABULARY)), (of_pieces, len(PIECES))]
)
@given(data=st.data())
def test_response_ends_at_the_first_stop_string(decode, size, data):
    strings = data.draw(st.lists(st.text("ab é", min_size=1, max_size=5), min_size=1, max_size=3))
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30)))
    expected = first_end(decode, strings, tokens)
    assert found_in_parts(StopStrings(strings, decode), tokens, cuts) == expected


@pytest.mark.parametrize(
    ("decode", "string", "tokens", "num_kept"),
    [
        (of_bytes, "é", [6, 7, 1], 2),
        (of_bytes, "éa", [6, 7, 7, 8], 4),
        (of_pieces, " a", [1, 2, 0, 0], 3),
        (of_pieces, " a", [2, 0, 0], None),
    ],
)
def test_parts_of_characters_and_leading_spaces(decode, string, tokens, num_kept):
    assert StopStrings([string], decode).num_kept([], tokens) == num_kept


def test_with_a_tokenizer_of_a_model():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    tokens = tokenizer.encode("a=1 b=2<|end|>c=3")
    for string, text in [("b=", "a=1 b="), ("<|end|>", "a=1 b=2<|end|>"), ("2c", None)]:
        num = StopStrings([string], tokenizer.decode).num_kept([], tokens)
        assert (num and tokenizer.decode(tokens[:num])) == text


def test_tokens_that_cannot_end_one_are_not_looked_at():
    """Decoding them would cost time, as every step checks each request."""
    asked = []

    def decode(tokens: Sequence[int]) -> str:
        asked.append(len(tokens))
        return of_bytes(tokens)

    stops = StopStrings(["ba"], decode)
    assert stops.num_kept([], [1, 1]) is None
    asked.clear()
    assert stops.num_kept([0] * 50, [1] * 50) is None
    assert asked == []
    assert stops.num_kept([0] * 50, [1, 0, 1]) == 2
