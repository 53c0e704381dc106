"""Races counts the races, those that a copy won, and the tokens wasted on copies that lost."""

from refrain.engines.rollout.races import Races
from refrain.schemas.rollout import FinishReason, Generated, Rollout
from tests.rollout.fakes import request


def finished(name, engine, token_ids):
    generated = Generated(token_ids, [-1.0] * len(token_ids), ())
    return Rollout(request(name, 9), generated, FinishReason.STOP, engine, 0.0, 1.0)


def test_wasted_tokens_of_a_race_are_counted():
    races, id = Races(), request("a", 9).id
    races.begin(id, 0, 1, 100)
    races.begin(id, 1, 2, 150)
    assert not races.win(finished("b", 1, [1, 2]))
    assert races.win(finished("a", 2, [1, 2]))
    races.lose(id, 0, 130)
    races.lose(id, 1, 180)
    assert (races.num_raced, races.num_won, races.wasted_tokens) == (2, 1, 110)


def test_the_origin_that_wins_wins_no_race():
    races, id = Races(), request("a", 9).id
    races.begin(id, 0, 1, 100)
    assert races.win(finished("a", 0, [1, 2]))
    races.lose(id, 1, 90)
    assert (races.num_raced, races.num_won, races.wasted_tokens) == (1, 0, 0)


def test_copies_that_move_and_meet():
    """The origin's copy moves to engine 4 and stays the origin: its finish wins no race."""
    races, id = Races(), request("a", 9).id
    races.begin(id, 0, 1, 100)
    races.begin(id, 0, 2, 110)
    races.leave(id, 1, 140)
    races.move(id, 0, 4)
    races.move(request("b", 9).id, 0, 4)
    assert races.win(finished("a", 4, [1, 2]))
    races.lose(id, 2, 115)
    assert (races.num_raced, races.num_won, races.wasted_tokens) == (2, 0, 45)


def test_last_copy_is_not_raced_any_more():
    races, id = Races(), request("a", 9).id
    races.begin(id, 0, 1, 100)
    races.leave(id, 0, 140)
    assert not races.win(finished("a", 1, [1, 2]))
    assert (races.num_won, races.wasted_tokens) == (0, 40)
