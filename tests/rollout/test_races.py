"""Races and redrafts on fake engines, in virtual time. Every request finishes once with the tokens
that it has without moves, and no engine keeps a copy."""

from itertools import pairwise

import pytest

from refrain.engines.rollout.moves import (
    Concede,
    Defer,
    EngineView,
    Migrate,
    Race,
    Redraft,
    RolloutView,
)
from refrain.schemas.timeline import MoveKind
from tests.rollout.fakes import FAST, SLOW, FakeEngine, MoveAt, request, work
from tests.rollout.racing import LONG, SHORT, assert_once, drafted, race_at, roll_out


def test_a_faster_copy_wins():
    engines = [FakeEngine(0), FakeEngine(1)]
    works = [[(0, request("p0", LONG))]]
    recorder, (outcome,) = roll_out(engines, works, race_at(10, 1))
    assert_once(recorder, works, engines)
    assert recorder.finished[1][0].engine == 1
    moves = outcome.moves
    assert (moves.num_raced, moves.num_races_won, moves.num_migrated) == (1, 1, 0)
    assert [(s.engine, s.num_rollouts, s.num_tokens) for s in outcome.shares] == [
        (0, 0, 0),
        (1, 1, LONG),
    ]
    (move,) = recorder.timeline.moves
    assert (move.kind, move.from_engine, move.to_engine) == (MoveKind.RACED, 0, 1)
    (lost,) = engines[0].withdrawn
    assert outcome.moves.wasted_tokens == len(lost.generated.token_ids) - move.num_tokens > 5
    # The copy needs a third of the remaining ticks.
    assert outcome.finished_s < 0.75 * LONG * 0.001


class RaceAtOnce:
    """Races all requests to all targets once, when each request has `num_tokens` tokens."""

    def __init__(self, num_tokens, targets):
        self.num_tokens, self.targets = num_tokens, targets

    def decide(self, view):
        progress = view.engines[0].progress
        if not self.targets or min(progress.values(), default=0) < self.num_tokens:
            return []
        targets, self.targets = self.targets, ()
        return [Race(id, target, FAST) for id in progress for target in targets]


@pytest.mark.parametrize("nodes", ["aaab", "ab b", "    "])
def test_keys_and_values_go_along_within_a_node(nodes):
    """An engine saves keys and values once for all copies that go to its node at the same time, so
    it pauses once."""
    engines = [FakeEngine(i, node_id=node.strip() or None) for i, node in enumerate(nodes)]
    works = [[(0, request("p0", LONG)), (0, request("p1", LONG))]]
    races = [RaceAtOnce(10, (1, 2, 3))]
    recorder, (outcome,) = roll_out(engines, works, races, moves_kv=lambda *_: True)
    assert_once(recorder, works, engines)
    same = [node == nodes[0] != " " for node in nodes]
    assert [[bool(r.kv) for r in engine.submitted] for engine in engines[1:]] == [
        [kept] * 2 for kept in same[1:]
    ]
    assert (outcome.moves.num_raced, outcome.moves.num_raced_with_kv) == (6, 2 * sum(same[1:]))
    assert engines[0].calls.count("copy") == len(set(same[1:]))


def test_requests_take_keys_and_values_along_where_that_is_cheaper():
    """p1 has too few tokens: its copy computes them again."""
    engines = [FakeEngine(0, node_id="a", tp_degree=2), FakeEngine(1, node_id="a")]
    works = [[(0, drafted("p0", LONG, FAST)), (0, request("p1", LONG))]]
    asked = []

    def moves_kv(*about):
        asked.append(about)
        return about[2] >= 20

    recorder, _ = roll_out(engines, works, [RaceAtOnce(8, (1,))], moves_kv=moves_kv)
    assert_once(recorder, works, engines)
    assert {r.id.prompt_key: bool(r.kv) for r in engines[1].submitted} == {"p0": True, "p1": False}
    assert asked == [(2, 1, 3 + 24), (2, 1, 3 + 8)]


def test_a_migrated_request_takes_keys_and_values_along():
    """The origin saves most of them while it goes on. Others finish meanwhile."""
    engines = [FakeEngine(0, node_id="a", copy_s=0.01), FakeEngine(1, node_id="a")]
    works = [[(0, request("p0", LONG)), (0, request("p1", LONG)), (1, request("p2", 20))]]
    migrates = MoveAt("p0", 10, lambda id: Migrate(id, 1))
    recorder, (outcome,) = roll_out(engines, works, [migrates], moves_kv=lambda *_: True)
    assert_once(recorder, works, engines)
    assert engines[0].saved_ahead == [request("p0", LONG).id]
    (moved,) = (r for r in engines[1].submitted if r.id.prompt_key == "p0")
    assert moved.kv
    assert len(moved.generated.token_ids) > 18, "it went on while it was saved"
    assert outcome.moves.num_migrated == 1


class Seen:
    """Takes no decision. Keeps the times of all views."""

    def __init__(self):
        self.at_s = []

    def decide(self, view):
        self.at_s.append(view.elapsed_s)
        return []


def test_all_races_begin_at_once_while_events_are_handled():
    """Copies and submissions take 50 ms each. Nothing waits for them but their race."""
    engines = [FakeEngine(i, copy_s=0.05, submit_s=0.05 if i > 3 else 0.0) for i in range(8)]
    works = [[(i, request(f"p{i}", 300)) for i in range(4)]]
    races = [race for i in range(4) for race in race_at(10, i + 4, prompt=f"p{i}")]
    seen = Seen()
    recorder, (outcome,) = roll_out(engines, works, [*races, seen])
    assert_once(recorder, works, engines)
    assert (outcome.moves.num_raced, outcome.moves.num_races_won) == (4, 4)
    begun_s = [move.at_s for move in recorder.timeline.moves]
    assert max(begun_s) - min(begun_s) < 0.005
    assert max(late - early for early, late in pairwise(seen.at_s)) < 0.005


@pytest.mark.parametrize(
    ("copy_s", "submit_s"), [(0.02, 0.0), (0.0, 0.02)], ids=["copied", "submitted"]
)
@pytest.mark.parametrize("event", ["finished", "origin dies", "target dies", "next stage"])
def test_what_happens_while_a_race_begins(event, copy_s, submit_s):
    """The copy takes 20 ticks, or its way to the target does."""
    dies = {"origin dies": 0, "target dies": 1}.get(event)
    engines = [
        FakeEngine(
            i,
            copy_s=copy_s if i == 0 else 0.0,
            submit_s=submit_s if i == 1 else 0.0,
            die_at_tick=15 if i == dies else None,
        )
        for i in range(3)
    ]
    length = 20 if event == "finished" else 60
    works = [[(0, request("p0", length)), (1, request("p1", 15)), (2, request("p2", 90))]]
    if event == "next stage":  # The target has finished its part before the copy arrives.
        works.append([(i, request(f"q{i}", SHORT, step=2)) for i in range(3)])
    recorder, (outcome, *_) = roll_out(engines, works, race_at(10, 1, drafting=FAST))
    assert_once(recorder, works, engines)
    moves = outcome.moves
    if event == "finished":
        assert (moves.num_raced, moves.num_races_won) == (bool(submit_s), 0)
    if event == "next stage":
        assert (moves.num_raced, moves.num_races_won) == (1, 1)


def test_origin_may_concede_to_a_leading_copy():
    """The origin concedes: its engine drops the request, and the copy has won."""
    engines = [FakeEngine(0), FakeEngine(1)]
    works = [[(0, request("p0", LONG)), (0, request("p1", LONG))]]
    concedes = MoveAt("p0", 20, lambda id: Concede(id, 0))
    recorder, (outcome,) = roll_out(engines, works, [*race_at(10, 1), concedes])
    assert_once(recorder, works, engines)
    (conceded,) = engines[0].withdrawn
    assert conceded.id.prompt_key == "p0"
    by_key = {r.request.id.prompt_key: r.engine for r in recorder.finished[1]}
    assert by_key == {"p0": 1, "p1": 0}
    moves = outcome.moves
    assert (moves.num_raced, moves.num_races_won) == (1, 1)
    assert moves.wasted_tokens == len(conceded.generated.token_ids) - 10


def test_the_only_copy_is_not_conceded():
    engines = [FakeEngine(0), FakeEngine(1)]
    works = [[(0, request("p0", LONG))]]
    recorder, (outcome,) = roll_out(engines, works, [MoveAt("p0", 5, lambda id: Concede(id, 0))])
    assert_once(recorder, works, engines)
    assert not engines[0].withdrawn
    assert outcome.moves.num_races_won == 0


def test_a_request_that_was_conceded_survives_the_copy_s_engine():
    """It goes on at another engine, and may be raced again from there."""
    engines = [FakeEngine(0), FakeEngine(1, die_at_tick=30), FakeEngine(2)]
    works = [[(0, request("p0", 60)), (1, request("p1", 60)), (2, request("p2", 60))]]
    again = [MoveAt("p0", 40, lambda id, e=e: Race(id, e, FAST)) for e in (0, 2)]
    concedes = MoveAt("p0", 15, lambda id: Concede(id, 0))
    recorder, _ = roll_out(engines, works, [*race_at(5, 1), concedes, *again])
    assert_once(recorder, works, engines)
    assert engines[1].num_starts == 2


def test_a_copy_that_loses_leaves_its_engine_to_the_next_stage():
    engines = [FakeEngine(0), FakeEngine(1)]
    works = [
        [(0, drafted("p0", LONG, FAST)), (0, request("p1", 90)), (1, request("p2", SHORT))],
        [(1, request("q", SHORT, step=2))],
    ]
    recorder, (one, _) = roll_out(engines, works, race_at(1, 1, drafting=SLOW))
    assert_once(recorder, works, engines)
    begun = {
        (s.engine, s.label): s.start_s for s in recorder.timeline.spans if s.activity == "sync"
    }
    assert one.moves.num_raced == 1
    assert LONG / 3 < 1000 * begun[1, "train/2"] < LONG / 3 + 3 < 1000 * one.finished_s


@pytest.mark.parametrize(("loser", "drafting"), [(0, FAST), (1, SLOW)])
def test_a_loser_that_has_finished_meanwhile_does_not_count(loser, drafting):
    """The loser's rollout arrives as an event while the stage goes on."""
    engines = [FakeEngine(i, late=i == loser) for i in range(2)]
    own = SLOW if drafting is FAST else FAST
    works = [[(0, drafted("p0", LONG, own)), (0, request("p1", 90)), (1, request("p2", 90))]]
    recorder, (outcome,) = roll_out(engines, works, race_at(10, 1, drafting=drafting))
    assert_once(recorder, works, engines)
    assert not engines[loser].withdrawn
    assert {r.engine for r in recorder.finished[1] if r.request.id.prompt_key == "p0"} == {
        1 - loser
    }
    assert outcome.moves.num_races_won == 1 - loser
    assert sum(share.num_rollouts for share in outcome.shares) == 3


def test_copies_that_finish_at_one_time_count_once():
    """The coordinator reads both rollouts before it can stop either engine."""
    engines = [FakeEngine(0), FakeEngine(1)]
    works = [[(0, request("p0", LONG)), (1, request("p1", LONG + 9))]]
    recorder, (outcome,) = roll_out(engines, works, race_at(10, 1, drafting=SLOW))
    assert_once(recorder, works, engines)
    assert outcome.moves.num_raced == 1
    assert not any(engine.withdrawn for engine in engines)


def test_a_loser_with_other_tokens_is_noticed():
    """All copies must have the same tokens: another drafter must not change the samples."""
    engines = [FakeEngine(0), FakeEngine(1, late=True, salt="other")]
    works = [[(0, drafted("p0", LONG, FAST)), (0, request("p1", 90)), (1, request("p2", 90))]]
    _, (outcome,) = roll_out(engines, works, race_at(10, 1, drafting=SLOW))
    assert outcome.moves.num_diverged == 1


def test_three_copies_and_one_that_counts():
    engines = [FakeEngine(i) for i in range(3)]
    works = [[(0, request("p0", LONG))]]
    policies = [*race_at(10, 1, drafting=SLOW), *race_at(20, 2)]
    recorder, (outcome,) = roll_out(engines, works, policies)
    assert_once(recorder, works, engines)
    assert (outcome.moves.num_raced, outcome.moves.num_races_won) == (2, 1)
    first, second = sorted(recorder.timeline.moves, key=lambda move: move.at_s)
    assert (first.to_engine, second.to_engine) == (1, 2)
    lost = [len(engines[i].withdrawn[0].generated.token_ids) for i in (0, 1)]
    assert outcome.moves.wasted_tokens == sum(lost) - 2 * first.num_tokens


def test_a_request_that_waits_for_weights_may_be_raced():
    """Its engine has not received the request yet: do not ask it for a copy or a withdrawal."""
    engines = [FakeEngine(0, sync_s=0.05), FakeEngine(1)]
    works = [[(0, request("p0", LONG)), (1, request("p1", 90))]]
    recorder, (outcome,) = roll_out(engines, works, race_at(0, 1))
    assert_once(recorder, works, engines)
    moves = outcome.moves
    assert (moves.num_raced, moves.num_races_won, moves.wasted_tokens) == (1, 1, 0)
    assert not engines[0].submitted


def test_a_raced_request_neither_migrates_nor_is_deferred():
    engines = [FakeEngine(i) for i in range(3)]
    works = [work(step, [LONG, LONG, SHORT], 3) for step in (1, 2)]
    policies = [
        *race_at(3, 1),
        MoveAt("p0", 5, lambda id: Migrate(id, 2)),
        MoveAt("p0", 5, lambda id: Defer(id, 2)),
    ]
    recorder, outcomes = roll_out(engines, works, policies, min_rollouts=0)
    assert_once(recorder, works, engines)
    assert outcomes[0].moves.num_raced == 1
    assert (outcomes[0].moves.num_migrated, outcomes[0].deferred) == (0, ())


@pytest.mark.parametrize(
    ("at", "prompt", "num_tokens"),
    [(0, "p0", 10), (1, "p0", 10), (1, "gone", 0)],
    ids=["where it is", "at the next stage", "none"],
)
def test_impossible_races_are_ignored(at, prompt, num_tokens):
    engines = [FakeEngine(0), FakeEngine(1)]
    works = [work(step, [LONG, SHORT]) for step in (1, 2)]
    policies = race_at(num_tokens, at, prompt=prompt)
    recorder, outcomes = roll_out(engines, works[: at + 1], policies)
    assert_once(recorder, works[: at + 1], engines)
    assert outcomes[0].moves.num_raced == 0
    assert recorder.versions(1) == {0}


# Deaths


@pytest.mark.parametrize(
    ("dying", "method"),
    [
        (0, "copy"),
        (0, "withdraw"),
        (0, "next_events"),
        (1, "submit"),
        (1, "redraft"),
        (1, "withdraw"),
        (2, "withdraw"),
        (2, "load_weights"),
    ],
)
@pytest.mark.parametrize("drafting", [FAST, SLOW])
def test_a_death_in_the_middle_of_a_race_loses_and_doubles_nothing(dying, method, drafting):
    engines = [FakeEngine(i, dies_in=method if i == dying else None) for i in range(3)]
    works = [work(step, [LONG, 12, 30, 9, LONG, 25], 3) for step in (1, 2)]
    policies = [
        *race_at(3, 1, 2, drafting=drafting),
        *race_at(5, 2, drafting=drafting, prompt="p1"),
        MoveAt("p4", 3, lambda id: Redraft(id, 1, FAST)),
    ]
    recorder, outcomes = roll_out(engines, works, policies)
    assert_once(recorder, works, engines)
    assert sum(outcome.moves.num_raced for outcome in outcomes) > 0


@pytest.mark.parametrize("dying", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_last_copy_of_a_race_moves_after_deaths(dying):
    """At tick 15, engines 0 and 1 have copies of p0, engine 2 has none."""
    engines = [FakeEngine(i, die_at_tick=15 + 3 * i if i in dying else None) for i in range(3)]
    works = [[(0, request("p0", LONG)), (1, request("p1", LONG)), (2, request("p2", LONG))]]
    recorder, (outcome,) = roll_out(engines, works, race_at(3, 1, drafting=SLOW))
    assert_once(recorder, works, engines)
    submitted = [r.id.prompt_key for e in engines for r in e.submitted].count("p0")
    assert [engine.num_starts - 1 for engine in engines] == [int(i in dying) for i in range(3)]
    assert submitted - 1 - outcome.moves.num_raced == (1 if {0, 1} <= set(dying) else 0)


def test_the_only_copy_left_is_raced_no_more():
    """After the death the request may migrate. Its finish wins no race."""
    engines = [FakeEngine(0, die_at_tick=12), FakeEngine(1), FakeEngine(2)]
    works = [[(0, request("p0", LONG)), (1, request("p1", 60)), (2, request("p2", 60))]]

    class RaceThenMigrate:
        raced = False

        def decide(self, view):
            ids = [id for e in view.engines for id in e.progress if id.prompt_key == "p0"]
            move = Migrate if self.raced and view.elapsed_s > 0.02 else None
            if not self.raced and view.elapsed_s > 0.005:
                self.raced = True
                return [Race(id, 1, SLOW) for id in ids]
            return [move(id, 2) for id in ids] if move else []

    recorder, (outcome,) = roll_out(engines, works, [RaceThenMigrate()])
    assert_once(recorder, works, engines)
    moves = outcome.moves
    assert (moves.num_raced, moves.num_races_won, moves.wasted_tokens) == (1, 0, 0)
    assert outcome.moves.num_migrated == 1
    assert {r.engine for r in recorder.finished[1] if r.request.id.prompt_key == "p0"} == {2}


# Drafting


class Views:
    """Takes no decision. Keeps the engine views."""

    def __init__(self):
        self.seen = []

    def decide(self, view):
        self.seen += view.engines
        return []


def test_redrafts_of_one_decision_are_one_call():
    engines = [FakeEngine(0), FakeEngine(1)]
    works = [work(1, [LONG, LONG, LONG, SHORT])]

    class AllOnce:
        asked = False

        def decide(self, view):
            found = [(id, e.engine) for e in view.engines for id in e.progress]
            if self.asked or view.elapsed_s < 0.01:
                return []
            self.asked = True
            return [Redraft(id, engine, FAST) for id, engine in found]

    views = Views()
    recorder, _ = roll_out(engines, works, [AllOnce(), views])
    assert_once(recorder, works, engines)
    assert [[{id.prompt_key for id in call} for call in e.redrafted] for e in engines] == [
        [{"p0", "p2"}],
        [{"p1"}],
    ]
    told = [{id.prompt_key: p.setting for id, p in e.drafting.items()} for e in views.seen]
    assert {"p0": FAST, "p2": FAST} in told
    assert {"p1": FAST} in told
    assert all(e.drafting.keys() <= e.progress.keys() for e in views.seen)


@pytest.mark.parametrize(
    "leave",
    [Migrate, Defer, "death", "withdraw", "redraft"],
)
def test_a_setting_goes_with_its_request(leave):
    """The engine returns requests without a setting, and may die before it reports the setting."""
    engines = [
        FakeEngine(0),
        FakeEngine(
            1,
            die_at_tick=12 if leave == "death" else None,
            dies_in=leave if leave in ("withdraw", "redraft") else None,
        ),
    ]
    works = [[(0, request("p0", 90)), (1, request("p1", 90))], [(0, request("q", 9, step=2))]]
    move = Defer if leave is Defer else Migrate

    class RedraftThenLeave:
        num_asked = 0

        def decide(self, view):
            ids = [id for e in view.engines if e.engine == 1 for id in e.progress]
            self.num_asked += bool(ids) and view.elapsed_s > 0.005
            if self.num_asked == 1:
                return [Redraft(id, 1, FAST) for id in ids]
            if self.num_asked == 4 and leave in (Migrate, Defer, "withdraw"):
                return [move(id, 0) for id in ids]
            return []

    recorder, _ = roll_out(engines, works, [RedraftThenLeave()], min_rollouts=0)
    again = [r for r in engines[0].submitted if r.id.prompt_key == "p1"]
    assert [r.drafting for r in again] == [FAST]
    assert_once(recorder, works, engines)


def test_a_race_leaves_the_origins_drafting():
    engines = [FakeEngine(0), FakeEngine(1)]
    works = [[(0, drafted("p0", LONG, SLOW))]]
    views = Views()
    recorder, _ = roll_out(engines, works, [*race_at(10, 1), views])
    assert_once(recorder, works, engines)
    assert [r.drafting for r in engines[1].submitted] == [FAST]
    settings_of = {(e.engine, p.setting) for e in views.seen for p in e.drafting.values()}
    assert settings_of == {(0, SLOW), (1, FAST)}


def test_a_raced_request_counts_once_in_a_view():
    a, b = request("a", 9).id, request("b", 9).id
    engines = (EngineView(0, {a: 5, b: 7}), EngineView(1, {a: 8}))
    assert RolloutView(1.0, engines, 0, 2).num_tokens == 15
