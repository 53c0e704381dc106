"""A stage begins in a layout that is as good as the best one in hindsight. The layout stays when
lengths are unknown or a change gains nothing."""

from dataclasses import dataclass

import pytest

from refrain.engines.control.reshaping import MissedSavings
from refrain.engines.latency.interface import Latency
from refrain.engines.pat.remaining import FromHistory, Maximum
from refrain.engines.rollout.moves import EngineView, FirstLayout, Reshape, RolloutView
from refrain.schemas.rollout import LengthHistory, RequestId, Split
from tests.pat.stage import (
    ON_A40,
    POOL,
    costs_on_a40,
    long_tailed,
    play,
    switching,
    view_of,
)

FREE = costs_on_a40(wake_s=0.0)


def queued(num_requests, tp_degree=2):
    """Return a view with `num_requests` requests dealt in turn, none of which has begun."""
    num = len(POOL.engines[tp_degree])
    return view_of(
        tp_degree, {e: dict.fromkeys(range(e, num_requests, num), 0) for e in range(num)}
    )


def begun(lengths, tp_degree=2, **changes):
    """Return the TP degree in which the stage begins."""
    controller = switching(lengths, opens=True, **changes)
    assert isinstance(controller, FirstLayout)
    moves = controller.begin(queued(len(lengths), tp_degree))
    assert len(moves) <= 1
    return moves[0].tp_degree if moves else tp_degree


@pytest.mark.parametrize("num_requests", [4, 32, 128, 400])
@pytest.mark.parametrize("seed", [0, 1])
def test_as_good_as_the_best_beginning_in_hindsight(num_requests, seed):
    lengths = long_tailed(num_requests, seed)
    static_s = {tp: play(lambda _: [], lengths, begin=tp).seconds for tp in POOL.engines}
    played_s = {tp: play(switching(lengths).decide, lengths, begin=tp).seconds for tp in (2, 4, 8)}
    chosen = begun(lengths, costs=FREE)
    assert played_s[chosen] < 1.02 * min([*played_s.values(), *static_s.values()])
    assert played_s[chosen] <= 1.01 * min(static_s.values())


@dataclass(frozen=True)
class GuessedAt:
    """Wraps a latency model. At the TP degrees `guessed` its times are extrapolated."""

    latency: Latency
    guessed: tuple[int, ...]

    def __getattr__(self, name):
        return getattr(self.latency, name)

    def reaches(self, tp_degree, batch, context_tokens):
        assert batch >= 1
        assert context_tokens > 0
        return tp_degree not in self.guessed


@pytest.mark.parametrize(("guessed", "chosen"), [((), 8), ((8,), 4), ((4, 8), 2), ((2,), 2)])
def test_no_stage_begins_on_a_guess(guessed, chosen):
    latency = GuessedAt(ON_A40, guessed)
    assert begun([2000] * 3, costs=FREE, latency=latency) == chosen


def test_many_begin_in_a_lower_degree_than_few():
    """On this machine TP 8 is slower for many requests of the same length."""
    few, many = ([2000] * num for num in (3, 1500))
    assert begun(few, costs=FREE) == 8
    assert begun(many, costs=FREE) == min(
        POOL.engines, key=lambda tp: play(lambda _: [], many, begin=tp, tick_s=5.0).seconds
    )
    assert begun(many, costs=FREE) < 8


def change_after(history, wake_s):
    """Return the number of the first stage that begins in another layout, and its TP degree, or
    (None, 2). `history`: lengths of each stage."""
    missed_savings, costs = MissedSavings(), costs_on_a40(wake_s=wake_s)
    for number, lengths in enumerate(history, 1):
        controller = switching(lengths, opens=True, missed_savings=missed_savings, costs=costs)
        if moves := controller.begin(queued(len(lengths))):
            return number, moves[0].tp_degree
    return None, 2


def gain_s(lengths):
    static_s = [play(lambda _: [], lengths, begin=tp).seconds for tp in (2, 8)]
    return static_s[0] - static_s[1]


def test_a_change_is_made_once_as_much_was_forgone_as_it_costs():
    lengths = [2000] * 3
    for share, after in ((0.5, 1), (1.5, 2), (2.5, 3), (7.5, None)):
        assert change_after([lengths] * 6, share * gain_s(lengths)) == (after, 8 if after else 2)


def test_alternating_stages_keep_their_layout():
    """Stages with few requests gain at TP 8, and stages with many lose. When they alternate, the
    layout must not change back and forth."""
    few, many = [2000] * 3, [2000] * 1500
    wake_s = 1.5 * gain_s(few)
    assert change_after([few, few], wake_s) == (2, 8)
    assert change_after([few, many] * 3, wake_s) == (None, 2)
    assert change_after([many, few, few], wake_s) == (3, 8), (
        "a good earlier layout counts against a change"
    )


def test_missed_savings_reset_when_the_layout_changes():
    """A change also resets the savings of the other layouts, because they now compare with another
    layout."""
    missed_savings = MissedSavings({4: 1e6, 8: 1e6})
    lengths = [2000] * 3
    controller = switching(lengths, opens=True, missed_savings=missed_savings, costs=FREE)
    assert controller.begin(queued(3))
    assert missed_savings.totals == {}


def test_no_keys_and_values_are_paid_for():
    """With this slow link, moving even the prompts' keys and values would rule out a change. But no
    request has begun, so there are none to move."""
    dear = costs_on_a40(wake_s=0.0, link_bytes_per_s=1e-3, kv="move")
    assert begun([2000] * 3, costs=dear) == 8


def forecasts(present, medians, scenario=0.0):
    """Return the value of each layout as forecast from the layout `present`. Prompts of 8
    samples are dealt in turn."""
    engines, keys = POOL.engines[present], list(medians)
    view = RolloutView(
        0.0,
        tuple(
            EngineView(
                engine,
                {
                    RequestId(Split.TRAIN, 0, key, i): 0
                    for key in keys[place :: len(engines)]
                    for i in range(8)
                },
                tp_degree=present,
            )
            for place, engine in enumerate(engines)
        ),
        0,
        8 * len(medians),
    )
    history = {key: LengthHistory(m, round(1.5 * m), m) for key, m in medians.items()}
    remaining = FromHistory(history, 16_000, group_size=8)
    controller = switching(costs=FREE, remaining=remaining)
    state = controller.outlook.forecast(view, scenario)
    return controller.reshaping.openings(state)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scenario", [0.0, 1 / 3])
def test_a_layout_is_forecast_alike_from_each(seed, scenario):
    """Otherwise each of two layouts may look better from the other one, and a run pays for changes
    back and forth. This can happen because samples of a prompt stay together, so no layout balances
    its requests perfectly."""
    medians = {f"prompt-{i}": m for i, m in enumerate(long_tailed(16, seed))}
    base, *others = (forecasts(present, medians, scenario) for present in POOL.engines)
    assert set(base) == set(POOL.engines)
    for other in others:
        assert other == pytest.approx(base)


def test_without_lengths_it_begins_as_it_is():
    assert begun([2000] * 3, costs=FREE, remaining=Maximum(2000)) == 2
    nothing = FromHistory({}, 2000, group_size=1)
    assert not nothing.is_known
    assert begun([2000] * 3, costs=FREE, remaining=nothing) == 2
    history = {f"prompt-{i}": LengthHistory(2000.0, 2100, 2000.0) for i in range(3)}
    known = FromHistory(history, 4000, group_size=1)
    assert begun([2000] * 3, costs=FREE, remaining=known) == 8


def test_a_controller_that_does_not_open_chooses_no_layout():
    assert switching([2000] * 3, costs=FREE).begin(queued(3)) == []


def test_every_pool_by_itself():
    controller = switching([2000] * 3, opens=True, costs=FREE)
    assert controller.begin(queued(3)) == [Reshape(POOL.index, 8)]
    assert controller.begin(queued(0)) == []


def test_few_questions_are_asked():
    """Count the calls of the latency model for 128 responses on 8 GPUs and three layouts."""
    lengths = long_tailed(128, 0)
    asked = []
    latency = GuessedAt(ON_A40, ())

    class Counted:
        def __getattr__(self, name):
            def call(*args):
                asked.append(name)
                return getattr(latency, name)(*args)

            return call

    switching(lengths, latency=Counted(), opens=True, costs=FREE).begin(queued(128))
    assert len(asked) < 4000
