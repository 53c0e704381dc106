"""Placement puts each prompt on one engine, uses all engines, and mirrors them from step to
step."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.benchmarks.papers.settings import LinearLatency
from refrain.engines.histopipe.estimate import estimate_rollout_s
from refrain.engines.histopipe.placement import place_groups, plan_placement
from refrain.engines.histopipe.ranking import divide_evenly, rank_prompts
from refrain.schemas.rollout import LengthHistory

KEYS = [f"p{i}" for i in range(24)]
HISTORY = {key: LengthHistory(100.0 * (i + 1), 120 * (i + 1)) for i, key in enumerate(KEYS)}


@st.composite
def cases(draw):
    """Draw (keys, history, engines, groups, engines per group)."""
    num = draw(st.integers(1, 30))
    keys = [f"p{i}" for i in range(num)]
    lengths = st.builds(LengthHistory, st.floats(1, 1e4), st.integers(1, 10**4))
    known = draw(st.lists(st.none() | lengths, min_size=num, max_size=num))
    history = {key: length for key, length in zip(keys, known, strict=True) if length}
    history.setdefault("p0", LengthHistory(5, 7))
    num_engines, num_groups = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    parts = min(num_groups, num_engines, num)
    cuts = draw(st.permutations(range(1, num_engines)))[: parts - 1]
    ends = [0, *sorted(cuts), num_engines]
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    return keys, history, num_engines, num_groups, draw(st.none() | st.just(sizes))


def place(keys, history, step, num_engines, num_groups, sizes):
    ranked = rank_prompts(keys, history, min(num_groups, num_engines))
    return place_groups(ranked, sizes or divide_evenly(num_engines, len(ranked)), history, step)


@given(cases(), st.integers(1, 9))
@settings(deadline=None)
def test_each_step_is_the_mirror_image_of_the_next(case, step):
    keys, history, num_engines, num_groups, sizes = case
    now = place(keys, history, step, num_engines, num_groups, sizes)
    then = place(keys, history, step + 1, num_engines, num_groups, sizes)
    mirrored = [
        group.model_copy(update={"engine": num_engines - 1 - group.engine}) for group in now.groups
    ]
    assert list(then.groups) == mirrored
    for a, b in zip(now.ranking_groups, then.ranking_groups, strict=True):
        assert sorted(num_engines - 1 - engine for engine in a.engines) == list(b.engines)


@given(cases(), st.integers(1, 9))
@settings(deadline=None)
def test_every_prompt_once_on_an_engine_of_its_ranking_group(case, step):
    keys, history, num_engines, num_groups, sizes = case
    placement = place(keys, history, step, num_engines, num_groups, sizes)
    ranking = placement.ranking_groups
    assert sorted(group.prompt_key for group in placement.groups) == sorted(keys)
    assert sorted(e for group in ranking for e in group.engines) == list(range(num_engines))
    if sizes:
        assert [len(group.engines) for group in ranking] == sizes
    for group in placement.groups:
        assert group.engine in ranking[group.ranking_group].engines
        known = history.get(group.prompt_key)
        assert group.expected_tokens == (known.median_tokens if known else None)
    for rank, group in enumerate(ranking):
        members = [g.prompt_key for g in placement.groups if g.ranking_group == rank]
        assert group.num_prompts == len(members)
        longest = [history[key].longest_tokens for key in members if key in history]
        assert group.longest_tokens == max(longest, default=0)


@given(cases())
@settings(deadline=None)
def test_the_longest_expected_come_first_on_each_engine_and_over_all(case):
    placement = place(*case[:2], 1, *case[2:])
    ranks = [group.ranking_group for group in placement.groups]
    assert ranks == sorted(ranks, reverse=True)
    by_engine = {}
    for group in placement.groups:
        if group.expected_tokens is not None:
            by_engine.setdefault(group.engine, []).append(group.expected_tokens)
    assert all(tokens == sorted(tokens, reverse=True) for tokens in by_engine.values())


def test_odd_steps_begin_with_the_shortest_group_on_engine_0():
    odd = place(KEYS, HISTORY, 1, 6, 3, [1, 2, 3])
    assert [group.engines for group in odd.ranking_groups] == [(0,), (1, 2), (3, 4, 5)]
    assert [group.longest_tokens for group in odd.ranking_groups] == [960, 1920, 2880]
    assert [group.representative_tokens for group in odd.ranking_groups] == [450, 1250, 2050]
    even = place(KEYS, HISTORY, 2, 6, 3, [1, 2, 3])
    assert [group.engines for group in even.ranking_groups] == [(5,), (3, 4), (0, 1, 2)]
    # Eight prompts go to three engines, whose loads differ by at most one prompt.
    loads = [sum(g.expected_tokens for g in even.groups if g.engine == e) for e in (0, 1, 2)]
    assert max(loads) - min(loads) <= 2400


def test_without_any_history_nothing_can_be_ranked():
    with pytest.raises(AssertionError, match="nothing to rank by"):
        plan_placement(KEYS, {"other": LengthHistory(1, 1)}, 1, 4, 2)


def test_a_plan_counts_groups_and_allocates_by_time():
    plain = plan_placement(KEYS, HISTORY, 1, 12, 4)
    assert [len(group.engines) for group in plain.ranking_groups] == [4, 4, 4]
    assert len(plan_placement(KEYS, HISTORY, 1, 5, 4, num_groups=50).ranking_groups) == 5
    asked = []

    def rollout_time(lengths, num_engines, *, tokens_per_pass, context_per_token):
        asked.append(lengths.shape)
        assert (tokens_per_pass == np.ones(lengths.shape)).all()
        assert (context_per_token == 1.0).all()
        latency = LinearLatency(0.01, 1e-3, 1e-6)
        return estimate_rollout_s(latency, 1, lengths, num_engines, tokens_per_pass=tokens_per_pass)

    timed = plan_placement(KEYS, HISTORY, 1, 12, 4, rollout_time)
    assert set(asked) == {(8, 4)}
    few = plan_placement(KEYS, HISTORY, 1, 5, 4, rollout_time, num_groups=50)
    assert len(few.ranking_groups) == 5
    shares = [len(group.engines) for group in timed.ranking_groups]
    assert sum(shares) == 12
    assert shares != [4, 4, 4]


@given(cases(), st.integers(1, 9))
@settings(deadline=None)
def test_placement_on_remaining_engines_only_renumbers_them(case, step):
    keys, history, num_engines, num_groups, sizes = case
    left = [3 * i + 1 for i in range(num_engines)]
    placement = place(keys, history, step, num_engines, num_groups, sizes)
    there = placement.on(left)
    back = {engine: i for i, engine in enumerate(left)}
    for own, other in zip(there.groups, placement.groups, strict=True):
        assert own.model_copy(update={"engine": back[own.engine]}) == other
    for own, other in zip(there.ranking_groups, placement.ranking_groups, strict=True):
        assert tuple(back[engine] for engine in own.engines) == other.engines
        assert list(own.engines) == sorted(own.engines)
