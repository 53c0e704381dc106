"""Expected passes equal the tokens without drafts, and fewer with accepted drafts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.histopipe.passes import TOKENS, fit_passes
from refrain.engines.histopipe.placement import deal_groups, plan_placement
from refrain.engines.histopipe.ranking import rank_prompts
from refrain.schemas.rollout import LengthHistory

lengths = st.floats(1, 1e5)
undrafted = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    lengths.map(lambda tokens: LengthHistory(tokens, int(2 * tokens))),
    min_size=1,
)
drafted = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.builds(
        lambda tokens, gained: LengthHistory(tokens, int(2 * tokens), None, gained),
        lengths,
        st.floats(1, 17),
    ),
    min_size=1,
)


def seconds(lengths, num_engines, *, tokens_per_pass, context_per_token):
    assert (context_per_token == 1.0).all()
    return float((lengths / tokens_per_pass).sum()) / num_engines**2


@given(undrafted, st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.integers(1, 9))
@settings(deadline=None)
def test_without_drafts_passes_are_tokens_and_plans_those_by_tokens(history, tokens, num_engines):
    expected, keys = fit_passes(history), list(history)
    table = np.array([tokens])
    for key in (*keys, "never seen"):
        assert (expected.table([key], table) == table).all()
    medians = {key: of.median_tokens for key, of in history.items()}
    by_tokens = deal_groups(keys, medians, num_engines)
    assert deal_groups(keys, medians, num_engines, expected) == by_tokens
    args = (keys, history, 2, num_engines, 4, seconds)
    assert plan_placement(*args, expected) == plan_placement(*args)


@given(drafted, lengths, st.none() | st.floats(1, 17))
@settings(deadline=None)
def test_passes_lie_between_one_and_the_tokens(history, tokens, gained):
    expected = fit_passes(history, gained)
    for key in (*history, "never seen"):
        (passes,) = expected.of({key: tokens}).values()
        assert 1.0 <= passes <= tokens


@given(drafted, st.floats(1, 1e4), st.floats(1, 10))
@settings(deadline=None)
def test_a_longer_response_to_a_prompt_takes_no_fewer_passes(history, tokens, factor):
    expected = fit_passes(history)
    for key in history:
        assert expected.of({key: tokens})[key] <= expected.of({key: tokens * factor})[key]


def test_a_line_through_the_prompts_is_found():
    medians = np.geomspace(20, 5000, 60)
    history = {
        f"p{i}": LengthHistory(tokens, 0, None, tokens / (0.5 * tokens**0.8))
        for i, tokens in enumerate(medians.tolist())
    }
    expected = fit_passes(history)
    assert expected.slope == pytest.approx(0.8, abs=0.01)
    passes = expected.of({key: of.median_tokens for key, of in history.items()})
    assert list(passes.values()) == pytest.approx(0.5 * medians**0.8, rel=0.05)
    # A prompt without history is on the line.
    assert expected.of({"new": 1000.0})["new"] == pytest.approx(0.5 * 1000**0.8, rel=0.05)


def test_a_prompt_keeps_half_of_what_it_differs():
    slow, fast = LengthHistory(100, 0, None, 2.0), LengthHistory(100, 0, None, 8.0)
    passes = fit_passes({"slow": slow, "fast": fast}).of({"slow": 100, "fast": 100, "new": 100})
    # In the last epoch the ratio was 4. Half of it, in logarithms, is 2.
    assert passes["slow"] / passes["fast"] == pytest.approx(2.0)
    assert passes["new"] == pytest.approx(25.0)


@given(drafted, st.floats(2, 8))
@settings(deadline=None)
def test_the_line_is_at_what_a_pass_gains_now(history, gained):
    now, then = fit_passes(history, gained), fit_passes(history)
    medians = np.array([[of.median_tokens] for of in history.values()])
    before = medians.sum() / then.table(list(history), medians).sum()
    tokens = np.full((1, 1), 1e9)
    ratio = then.table(["new"], tokens) / now.table(["new"], tokens)
    if now.scale * 1e9**now.slope < 1e9 and then.scale * 1e9**then.slope < 1e9:
        assert ratio == pytest.approx(gained / before)


def mixed(num: int) -> dict[str, LengthHistory]:
    """Return prompts of the same length. Every other one gains little from drafts."""
    return {f"p{i}": LengthHistory(100.0, 120, None, 1.1 if i % 2 else 10.0) for i in range(num)}


def test_dealt_by_passes_engines_have_the_same_passes():
    history = mixed(16)
    medians = {key: of.median_tokens for key, of in history.items()}

    def spread(groups):
        loads = [0.0, 0.0]
        for group in groups:
            loads[group.engine] += 100.0 / history[group.prompt_key].tokens_per_pass
        return max(loads) / min(loads)

    assert spread(deal_groups(list(history), medians, 2, fit_passes(history))) < 1.01
    assert spread(deal_groups(list(history), medians, 2)) > 5


def test_plans_rank_prompts_by_passes():
    history = mixed(12)
    expected = fit_passes(history)
    short, long = rank_prompts(list(history), history, 2, expected)
    assert short == [f"p{i}" for i in range(0, 12, 2)]
    assert long == [f"p{i}" for i in range(1, 12, 2)]
    asked = []

    def watched(lengths, num_engines, *, tokens_per_pass, context_per_token):
        asked.append(tuple(np.unique(tokens_per_pass.round(6))))
        given = {"tokens_per_pass": tokens_per_pass, "context_per_token": context_per_token}
        return seconds(lengths, num_engines, **given)

    plan = plan_placement(list(history), history, 1, 6, 4, watched, expected)
    (fast,), (slow,) = dict.fromkeys(asked)
    assert fast > 2 * slow
    of_short, of_long = plan.ranking_groups
    assert len(of_long.engines) > len(of_short.engines)
    assert of_short.representative_tokens == of_long.representative_tokens == 100.0
    assert of_long.representative_passes == pytest.approx(100.0 / slow)
    for group in plan.groups:
        ranking = plan.ranking_groups[group.ranking_group]
        assert group.expected_passes == pytest.approx(ranking.representative_passes)
    by_tokens = plan_placement(list(history), history, 1, 6, 4, seconds, TOKENS)
    assert [len(group.engines) for group in by_tokens.ranking_groups] == [3, 3]
