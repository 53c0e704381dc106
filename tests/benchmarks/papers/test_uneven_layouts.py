"""Layouts with several TP degrees at once, evaluated with the latency model alone."""

from dataclasses import dataclass

import pytest

from benchmarks.papers.scene import Exact
from benchmarks.papers.uneven_layouts import (
    NamedResponse,
    deal_uneven,
    end_s,
    layouts,
    play_s,
    ranked_s,
)
from tests.pat.stage import request

EVEN = [(8,), (4, 4), (2, 2, 2, 2)]
FOUND = [*EVEN, (4, 2, 2)]


@dataclass(frozen=True)
class Affine:
    """A step takes 8 ms over the TP degree, plus the same time for each response at any degree."""

    each_s: float = 1e-3

    def decode_s(self, tp_degree, batch, context_tokens):
        del context_tokens
        return 8e-3 / tp_degree + self.each_s * batch

    def verify_s(self, tp_degree, batch, context_tokens, window):
        return self.decode_s(tp_degree, batch * (1 + window), context_tokens)


def responses_of(lengths):
    return [NamedResponse(100, float(n), id=request(i)) for i, n in enumerate(lengths)]


def exact(responses):
    return Exact({one.id: round(one.remaining_tokens) for one in responses})


ONE_LONG = responses_of([4000, *[400] * 24])


def test_all_that_fill_a_node():
    assert sorted(layouts(8, (2, 4, 8))) == sorted(FOUND)
    assert all(sum(one) == 8 and list(one) == sorted(one, reverse=True) for one in FOUND)
    assert len(list(layouts(8, (1, 2, 4, 8)))) == 10


@pytest.mark.parametrize("layout", FOUND)
def test_everybody_is_dealt_once_and_the_long_ones_are_on_the_highest(layout):
    rank = {one.id: one.remaining_tokens for one in ONE_LONG}
    placed = deal_uneven(Affine(), layout, ONE_LONG, rank)
    assert [one.tp_degree for one in placed] == list(layout)
    dealt = [one.id for engine in placed for one in engine.responses]
    assert sorted(dealt, key=str) == sorted(rank, key=str)
    assert ONE_LONG[0] in placed[0].responses


def test_as_many_are_long_as_lets_all_end_alike():
    responses = responses_of(range(100, 6500, 100))
    rank = {one.id: one.remaining_tokens for one in responses}
    placed = deal_uneven(Affine(), (4, 2, 2), responses, rank)
    ends_s = [one.end_s(Affine()) for one in placed]
    assert max(ends_s) < 1.1 * min(ends_s)
    shortest = min(one.remaining_tokens for one in placed[0].responses)
    longest = max(one.remaining_tokens for engine in placed[1:] for one in engine.responses)
    assert shortest >= longest


def test_one_layout_is_played_as_it_is_forecast():
    """Lengths are known, so a new deal cannot improve on the first."""
    alike = responses_of([1000] * 16)
    rank = {one.id: one.remaining_tokens for one in alike}
    for layout in EVEN:
        forecast_s = end_s(Affine(), deal_uneven(Affine(), layout, alike, rank))
        played_s = play_s(Affine(), [layout], alike, exact(alike))
        assert played_s == pytest.approx(forecast_s)


def test_known_long_response_gains_from_uneven_layouts():
    known = exact(ONE_LONG)
    even_s, all_s = (play_s(Affine(), of, ONE_LONG, known) for of in (EVEN, FOUND))
    assert all_s < 0.9 * even_s
    assert ranked_s(Affine(), [(4, 2, 2)], ONE_LONG, known) >= all_s


@dataclass(frozen=True)
class Alike:
    """Expects the same length for all responses."""

    is_known = True

    def tokens(self, generated, scenario=0.0):
        del scenario
        return {id: max(1.0, 1000.0 - num) for id, num in generated.items()}


def test_misranked_long_response_makes_uneven_layouts_lose():
    last = [*ONE_LONG[1:], ONE_LONG[0]]
    known_s = ranked_s(Affine(), [(4, 2, 2)], last, exact(last))
    assert ranked_s(Affine(), [(4, 2, 2)], last, Alike()) > 1.05 * known_s
