"""Engines that end together, against all ways to cut the order of prompts."""

from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.papers.drafters import LATENCY
from benchmarks.papers.even_ends import even_ends, step_requests_of

GROUP = 4
lengths_of = st.lists(st.integers(1, 2000), min_size=1, max_size=7)


def ends(placed, lengths, step_requests) -> list[float]:
    """End of each engine, in units of what a request takes of a step."""
    of_engine: dict[int, list[float]] = {}
    for group in placed:
        of_engine.setdefault(group.engine, []).append(lengths[group.prompt_key])
    return [step_requests * max(own) + GROUP * sum(own) for own in of_engine.values()]


@given(lengths_of, st.integers(1, 5), st.floats(0, 300))
@example([5, 1435, 1603, 1060, 1864], 2, 5.0).via("filled from the shortest, an engine ends later")
def test_no_cut_ends_sooner(tokens, num_engines, step_requests):
    lengths = {f"p{i}": float(num) for i, num in enumerate(tokens)}
    placed = even_ends(step_requests, GROUP)(list(lengths), lengths, num_engines)
    assert sorted(group.prompt_key for group in placed) == sorted(lengths)
    assert {group.engine for group in placed} <= set(range(num_engines))
    ordered = sorted(lengths, key=lengths.__getitem__, reverse=True)
    least = min(
        max(ends(cut_up(ordered, cuts), lengths, step_requests))
        for num in range(min(num_engines, len(ordered)))
        for cuts in combinations(range(1, len(ordered)), num)
    )
    assert max(ends(placed, lengths, step_requests)) <= least * (1 + 1e-6)


def cut_up(ordered, cuts):
    return [
        SimpleNamespace(prompt_key=key, engine=sum(i >= cut for cut in cuts))
        for i, key in enumerate(ordered)
    ]


def test_the_longest_have_few_others_beside_them():
    lengths = {f"p{i}": 20_000.0 if i < 4 else 500.0 for i in range(100)}
    placed = even_ends(80.0, 16)(list(lengths), lengths, 8)
    engine_of = {group.prompt_key: group.engine for group in placed}
    others = [engine for key, engine in engine_of.items() if lengths[key] == 500.0]
    beside = {engine_of[f"p{i}"] for i in range(4)}
    assert sum(engine in beside for engine in others) < 0.2 * len(others)
    unknown = even_ends(80.0, 16)([*lengths, "new"], lengths, 8)
    assert len(unknown) == 101
    assert len(even_ends(80.0, 16)(["a", "b"], {}, 1)) == 2


def test_a_step_costs_as_much_as_so_many_requests():
    window, context = 3, 2048.0
    each_s = LATENCY.sequence_s * (window + 1) + LATENCY.token_s * context
    found = step_requests_of(LATENCY, 4, 256, context, window)
    assert found == pytest.approx(LATENCY.step_s / each_s)
