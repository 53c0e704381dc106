"""The cut that lets engines end together is as good as the best of all cuts. The choice between it
and equal passes agrees with forecasts of all engines."""

import itertools
from collections import Counter
from statistics import median

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from refrain.benchmarks.papers.drafters import LATENCY
from refrain.benchmarks.papers.settings import LinearLatency
from refrain.engines.histopipe.even_ends import cut_evenly, step_requests_of
from refrain.engines.histopipe.passes import fit_passes
from refrain.engines.histopipe.placement import (
    deal_groups,
    end_together,
    place_prompts,
    time_rollouts,
)
from refrain.engines.latency.forecast import Unfinished
from refrain.engines.simulate.run_config import run_config
from refrain.schemas.rollout import LengthHistory
from tests.latency.machines import finish_s

GROUP, PROMPT_TOKENS = 4, 256
lengths_of = st.lists(st.integers(1, 2000), min_size=1, max_size=7)
AT_ONCE = {"step_requests": 80.0, "group_size": 16, "max_num_seqs": 10**6}


def end_of(tokens, step_requests, max_num_seqs) -> float:
    """Return the end of an engine, in units of the time that a request adds to a step."""
    total = GROUP * sum(tokens)
    return step_requests * max(*tokens, total / max_num_seqs) + total


@given(lengths_of, st.integers(1, 5), st.floats(0, 300), st.sampled_from([1, 6, 10**6]))
@example([5, 1435, 1603, 1060, 1864], 2, 5.0, 10**6).via("from the shortest, an engine ends later")
@example([10, 9, 8, 7], 2, 100.0, 1).via("one at once: all passes count, not the longest")
def test_no_cut_ends_sooner_and_no_engine_has_nothing(tokens, num_engines, step_requests, places):
    ordered = sorted(tokens, reverse=True)
    engines = cut_evenly(
        ordered,
        num_engines,
        step_requests=step_requests,
        group_size=GROUP,
        max_num_seqs=places,
    )
    assert (len(engines), engines) == (len(ordered), sorted(engines))
    assert set(engines) == set(range(min(num_engines, len(ordered))))

    def last_end(shares):
        return max(end_of(own, step_requests, places) for own in shares)

    least = min(
        last_end([ordered[a:b] for a, b in itertools.pairwise((0, *cuts, len(ordered)))])
        for num in range(min(num_engines, len(ordered)))
        for cuts in itertools.combinations(range(1, len(ordered)), num)
    )
    taken = itertools.pairwise((*map(engines.index, sorted(set(engines))), len(ordered)))
    assert last_end([ordered[a:b] for a, b in taken]) <= least * (1 + 1e-6)


def test_the_longest_have_few_others_beside_them():
    lengths = {f"p{i}": 20_000.0 if i < 4 else 500.0 for i in range(100)}
    placed = end_together(list(lengths), lengths, 8, **AT_ONCE)
    engine_of = {group.prompt_key: group.engine for group in placed}
    others = [engine for key, engine in engine_of.items() if lengths[key] == 500.0]
    beside = {engine_of[f"p{i}"] for i in range(4)}
    assert sum(engine in beside for engine in others) < 0.2 * len(others)
    unknown = end_together([*lengths, "new"], lengths, 8, **AT_ONCE)
    assert len(unknown) == 101
    assert [group.expected_tokens for group in unknown if group.prompt_key == "new"] == [None]
    assert len(end_together(["a", "b"], {}, 1, **AT_ONCE)) == 2


def test_engines_fill_up_to_the_longest_response():
    # Until the longest prompt ends, an engine can finish 80 (20K - 500) / (16 * 500) = 195 short
    # ones, or 48 if a step costs as much as 20 requests.
    lengths = [20_000.0] + 63 * [500.0]
    cheap = Counter(cut_evenly(lengths, 4, **AT_ONCE))
    assert cheap == {0: 1, 1: 61, 2: 1, 3: 1}
    dear = Counter(cut_evenly(lengths, 4, **AT_ONCE | {"step_requests": 20.0}))
    assert dear == {0: 1, 1: 48, 2: 14, 3: 1}


def test_drafted_prompts_go_by_their_passes():
    lengths = {f"p{i}": 400.0 for i in range(40)}
    history = {
        key: LengthHistory(400, 400, None, 1.0 if i < 4 else 16.0) for i, key in enumerate(lengths)
    }
    placed = end_together(list(lengths), lengths, 2, fit_passes(history), **AT_ONCE)
    assert placed[0].expected_passes > 2 * placed[-1].expected_passes
    first = {group.prompt_key for group in placed if group.engine == 0}
    assert {"p0", "p1", "p2", "p3"} <= first
    assert len(first) < 20


def test_a_step_costs_as_much_as_so_many_requests():
    window, context = 3, 2048.0
    each_s = LATENCY.sequence_s * (window + 1) + LATENCY.token_s * context
    found = step_requests_of(lambda num: LATENCY.verify_s(4, num, num * context, window), 256)
    assert found == pytest.approx(LATENCY.step_s / each_s)
    # Requests without measurable cost get a tiny cost.
    assert 1e5 < step_requests_of(lambda _: 0.01, 16) < 1e9
    assert step_requests_of(lambda num: 0.01 * num, 16) == 0


def config_of(staleness=0, max_num_seqs=256, race=True, placement="histopipe", **histopipe):
    rollout = {"group_size": GROUP, "max_num_seqs": max_num_seqs, "placement": placement}
    specactor = {"draft_models": [{"name": "small", "path": "m"}], "race": race}
    sections = {"rollout": rollout, "histopipe": histopipe, "specactor": specactor}
    return run_config(2000, staleness=staleness, **sections)


histories = st.lists(
    st.none() | st.builds(LengthHistory, st.integers(1, 2000), st.integers(1, 3000)),
    min_size=1,
    max_size=7,
).filter(any)
latencies = st.builds(LinearLatency, st.floats(1e-3, 1e-1), st.floats(0, 1e-2), st.floats(0, 1e-5))


@given(histories, st.integers(1, 5), latencies, st.sampled_from([2, 6, 256]))
def test_no_step_is_expected_to_end_later_than_with_equal_passes(
    known, num_engines, latency, max_num_seqs
):
    config = config_of(max_num_seqs=max_num_seqs)
    keys = [f"p{i}" for i in range(len(known))]
    history = {key: of for key, of in zip(keys, known, strict=True) if of}
    rollout_time = time_rollouts(config, latency, 0)
    placement, growth = place_prompts(config, keys, history, 3, num_engines, rollout_time)
    assert growth is None
    assert sorted(group.prompt_key for group in placement.groups) == keys
    assert len({group.engine for group in placement.groups}) == min(num_engines, len(keys))
    medians = {key: of.median_tokens for key, of in history.items()}
    equal = deal_groups(keys, medians, num_engines)
    ends_s = [
        forecast_s(groups, history, latency, max_num_seqs) for groups in (placement.groups, equal)
    ]
    assert [placement.expected_s, placement.equal_s] == pytest.approx(ends_s, rel=1e-6)
    assert placement.expected_s <= placement.equal_s
    if placement.groups != equal:
        assert placement.expected_s < placement.equal_s


def forecast_s(groups, history, latency, max_num_seqs) -> float:
    """Return when the last engine ends, by the forecast that decides on switches."""
    engines: dict[int, list[Unfinished]] = {}
    typical = median(of.median_tokens for of in history.values())
    for group in groups:
        of = history.get(group.prompt_key, LengthHistory(typical, 0))
        spread = max(1.0, of.longest_tokens / of.median_tokens) ** np.linspace(-1, 1, GROUP)
        requests = [Unfinished(PROMPT_TOKENS, of.median_tokens * one) for one in spread]
        engines.setdefault(group.engine, []).extend(requests)
    ends_s = [finish_s(latency, 1, own, max_num_seqs=max_num_seqs) for own in engines.values()]
    return max(ends_s)


def test_even_ends_need_waiting_and_racing_steps():
    # A step is expensive and a request cheap, so the longest responses determine the ends.
    latency = LinearLatency(step_s=0.01, sequence_s=1e-3, token_s=0.0)
    history = {f"p{i}": LengthHistory(1000 if i < 4 else 100, 0) for i in range(64)}
    keys = list(history)

    def placed(config, known=history, **how):
        time = time_rollouts(config, latency, 0, **how)
        return place_prompts(config, keys, known, 3, 4, time)[0]

    equal = deal_groups(keys, {key: of.median_tokens for key, of in history.items()}, 4)
    ending = placed(config_of())
    assert ending.expected_s < 0.95 * ending.equal_s
    assert Counter(group.engine for group in ending.groups) != Counter(g.engine for g in equal)
    moved = ending.on((7, 5, 3, 1))
    assert [(7, 5, 3, 1)[group.engine] for group in ending.groups] == [
        g.engine for g in moved.groups
    ]
    assert (moved.expected_s, moved.equal_s) == (ending.expected_s, ending.equal_s)
    off = placed(config_of(race=False))
    assert (off.groups, off.expected_s) == (equal, None)
    for unknown in (placed(config_of(), {}), placed(config_of(staleness=1, placement="even"))):
        assert unknown.expected_s is unknown.equal_s is None
    assert placed(config_of(staleness=1, placement="even")).groups == equal
    assert placed(config_of(staleness=1)).ranking_groups
    # If the cache holds few requests, a large batch gains nothing.
    tight = placed(config_of(), max_context_tokens=4 * 1200.0)
    assert tight.equal_s > 2 * ending.equal_s
