"""The layout in which a stage begins: as good as the best of them in hindsight, and left as it is
where nothing is known or nothing is gained."""

from dataclasses import dataclass

import pytest

from engines.control.objective import SoonestEnd
from engines.control.reshaping import STEPS_KEPT, Reshaping
from engines.latency.interface import Latency
from engines.pat.remaining import FromHistory, Maximum
from engines.rollout.moves import Opening, Reshape
from schemas.rollout import LengthHistory
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
    """So many, dealt in turn; none has begun."""
    num = len(POOL.engines[tp_degree])
    return view_of(
        tp_degree, {e: dict.fromkeys(range(e, num_requests, num), 0) for e in range(num)}
    )


def begun(lengths, tp_degree=2, **changes):
    """TP degree in which the stage begins."""
    controller = switching(lengths, opening=Reshaping(), **changes)
    assert isinstance(controller, Opening)
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
    """Another one's times, which are guesses at some TP degrees."""

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
    """On this machine TP 8 is the slower one for a crowd that ends together."""
    few, many = ([2000] * num for num in (3, 1500))
    assert begun(few, costs=FREE) == 8
    assert begun(many, costs=FREE) == min(
        POOL.engines, key=lambda tp: play(lambda _: [], many, begin=tp, tick_s=5.0).seconds
    )
    assert begun(many, costs=FREE) < 8


def test_also_to_a_lower_one():
    many = [2000] * 1500
    assert begun(many, 8, costs=FREE) == begun(many, 2, costs=FREE) < 8


def test_a_change_must_be_worth_what_it_costs():
    """Over the steps to come."""
    lengths = [2000] * 3
    gain_s = STEPS_KEPT * sum(
        sign * play(lambda _: [], lengths, begin=tp).seconds for sign, tp in ((1, 2), (-1, 8))
    )
    assert begun(lengths, costs=costs_on_a40(wake_s=0.5 * gain_s)) == 8
    assert begun(lengths, costs=costs_on_a40(wake_s=1.5 * gain_s)) == 2


def test_no_keys_and_values_are_paid_for():
    """Each response is long enough that moving its prompt would keep it from changing."""
    dear = costs_on_a40(wake_s=0.0, link_bytes_per_s=1e-3, kv="move")
    assert begun([2000] * 3, costs=dear) == 8


def test_without_lengths_it_begins_as_it_is():
    assert begun([2000] * 3, costs=FREE, remaining=Maximum(2000)) == 2
    nothing = FromHistory({}, 2000, group_size=1)
    assert not nothing.is_known
    assert begun([2000] * 3, costs=FREE, remaining=nothing) == 2
    history = {f"prompt-{i}": LengthHistory(2000.0, 2100, 2000.0) for i in range(3)}
    known = FromHistory(history, 4000, group_size=1)
    assert begun([2000] * 3, costs=FREE, remaining=known) == 8


def test_who_is_not_asked_says_nothing():
    assert switching([2000] * 3, costs=FREE).begin(queued(3)) == []


def test_every_pool_by_itself():
    controller = switching([2000] * 3, opening=Reshaping(SoonestEnd()), costs=FREE)
    assert controller.begin(queued(3)) == [Reshape(POOL.index, 8)]
    assert controller.begin(queued(0)) == []


def test_few_questions_are_asked():
    """128 responses on 8 GPUs, three layouts, by what the latency model is asked."""
    lengths = long_tailed(128, 0)
    asked = []
    latency = GuessedAt(ON_A40, ())

    class Counted:
        def __getattr__(self, name):
            def call(*args):
                asked.append(name)
                return getattr(latency, name)(*args)

            return call

    switching(lengths, latency=Counted(), opening=Reshaping(), costs=FREE).begin(queued(128))
    assert len(asked) < 4000
