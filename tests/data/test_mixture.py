"""Orders of an epoch: each source has its share of every step, no step draws a prompt twice, and a
curriculum skips what teaches nothing."""

from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.data.loader import PromptLoader
from refrain.engines.data.mixture import Mixture, Portion, num_draws, order_of, skipped
from refrain.schemas.data import PassRate
from refrain.schemas.inputs import CurriculumConfig

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)


def portions_of(sizes: list[int], weights: list[float]) -> list[Portion]:
    return [
        Portion(f"s{at}", tuple(f"{at}-{n}" for n in range(size)), weight)
        for at, (size, weight) in enumerate(zip(sizes, weights, strict=False))
    ]


def built(portions: list[Portion], per_step: int) -> Mixture | None:
    """Return the mixture, or None if a source is too small for it."""
    try:
        return Mixture(portions, per_step)
    except ValueError:
        return None


@given(
    sizes=SIZES,
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=4, max_size=4),
    per_step=st.integers(1, 12),
    skip_every=st.integers(1, 5),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    max_repeats=st.integers(1, 4),
)
def test_every_step_has_distinct_prompts_and_each_source_its_share(
    sizes, weights, per_step, skip_every, epoch, seed, shuffle, max_repeats
):
    portions = portions_of(sizes, weights)
    if (mixture := built(portions, per_step)) is None:
        return
    skips = {key for one in portions for key in one.keys[::skip_every] if skip_every > 1}
    given = {"shuffle": shuffle, "skipped": skips, "max_repeats": max_repeats}
    order = mixture.order(epoch, seed, **given)
    assert len(order) == sum(sizes)
    assert Mixture(portions, per_step).order(epoch, seed, **given) == order
    total = sum(one.weight for one in portions)
    for start in range(0, len(order), per_step):
        step = order[start : start + per_step]
        assert len(set(step)) == len(step)
        for at, portion in enumerate(portions):
            num = sum(key.startswith(f"{at}-") for key in step)
            assert abs(num - len(step) * portion.weight / total) < len(portions)


@given(size=st.integers(1, 40), epoch=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
def test_one_source_without_a_curriculum_keeps_its_order(size, epoch, seed):
    """It is that of runs that knew no mixtures."""
    keys = [f"p{n}" for n in range(size)]

    def place(key: str) -> str:
        return blake2b(f"{seed}/{epoch}/{key}".encode(), digest_size=16).hexdigest()

    mixture = Mixture([Portion("", tuple(keys))], 7)
    assert mixture.order(epoch, seed, shuffle=True) == tuple(sorted(keys, key=place))
    assert mixture.order(epoch, seed, shuffle=False) == tuple(keys)


@given(size=st.integers(2, 30), num=st.integers(1, 29), shuffle=st.booleans())
def test_parts_of_a_large_source_follow_each_other(size, num, shuffle):
    keys, num = [f"p{n}" for n in range(size)], min(num, size)
    times: Counter[str] = Counter()
    for epoch in range(5):
        times.update(order_of(keys, num, 1, epoch, 3, shuffle=shuffle))
        assert max(times.values()) - min(times[key] for key in keys) <= 1


def test_an_epoch_draws_by_weight():
    big, small = Portion("big", tuple("abcdefghij"), 1.0), Portion("small", ("x", "y"), 1.0)
    assert num_draws([big, small]) == [6, 6]
    mixture = Mixture([big, small], 2)
    order = mixture.order(0, 0, shuffle=False)
    assert order == ("a", "x", "b", "y", "c", "x", "d", "y", "e", "x", "f", "y")
    assert mixture.order(1, 0, shuffle=False)[::2] == ("g", "h", "i", "j", "a", "b")
    assert mixture.lines() == [
        "source big: 10 prompts, 50.0% of each step; an epoch draws each 0.6 times",
        "source small: 2 prompts, 50.0% of each step; an epoch draws each 3 times",
    ]


@pytest.mark.parametrize(
    ("weight", "per_step", "message"),
    [
        (1.0, 8, "source 'small' of data.train has 2 prompts, but by its weight a step draws 4"),
        (0.01, 2, "weight 0.01, too little for one prompt of an epoch: raise it"),
    ],
)
def test_a_source_too_small_for_a_step_is_refused(weight, per_step, message):
    with pytest.raises(ValueError, match=message):
        Mixture(
            [Portion("big", tuple("abcdefghij")), Portion("small", ("x", "y"), weight)], per_step
        )


def test_prompts_outside_the_window_are_skipped_and_come_back():
    settings = CurriculumConfig(min_pass_rate=0.1, max_pass_rate=0.9, skip_epochs=2)
    rates = {
        key: PassRate(rate, 3)
        for key, rate in {"never": 0.0, "low": 0.1, "in": 0.5, "high": 0.9, "always": 1.0}.items()
    }
    for epoch in (4, 5):
        assert skipped(rates, settings, epoch) == {"never", "low", "high", "always"}
    assert skipped(rates, settings, 6) == frozenset()
    usual = CurriculumConfig()
    assert skipped(rates, usual, 4) == {"never", "always"}


@given(num_skipped=st.integers(0, 20), max_repeats=st.integers(1, 4), seed=st.integers(0, 9))
def test_skipped_prompts_come_only_when_others_have_come_often_enough(
    num_skipped, max_repeats, seed
):
    keys = [f"p{n}" for n in range(20)]
    skips, kept = set(keys[:num_skipped]), keys[num_skipped:]
    given = {"shuffle": True, "max_repeats": max_repeats}
    drawn = Counter(order_of(keys, 20, 4, 1, seed, skipped=skips, **given))
    assert sum(drawn.values()) == 20
    num_left = max(0, 20 - max_repeats * len(kept))
    if len(kept) >= 4:
        assert sum(drawn[key] for key in skips) == min(num_left, num_skipped)
        assert max(drawn[key] for key in kept) - min(drawn[key] for key in kept) <= 1
    if not skips:
        assert list(order_of(keys, 20, 4, 1, seed, shuffle=True)) == list(
            order_of(keys, 20, 4, 1, seed, skipped=skips, **given)
        )


def test_a_loader_skips_by_the_rates_it_is_given():
    keys = [f"p{n}" for n in range(12)]
    given = {"prompts_per_step": 4, "num_epochs": 3, "shuffle": True, "seed": 0}
    loader = PromptLoader(keys, **given, curriculum=CurriculumConfig(max_repeats=2))
    plain = PromptLoader(keys, **given)
    rates = dict.fromkeys(keys[:5], PassRate(1.0, 0))
    second = [loader.prompts_of(step, rates) for step in (4, 5, 6)]
    assert set().union(*second) == set(keys[5:])
    assert [len(set(step)) for step in second] == [4, 4, 4]
    assert loader.skipped(4, rates) == set(keys[:5])
    assert plain.prompts_of(4, rates) == plain.prompts_of(4) == loader.prompts_of(4)
    refills = loader.refills_of(4, rates)
    assert set(refills) == set(keys[5:]) - set(second[0])
    assert len(set(refills)) == len(refills)
