"""Pools that switch layouts, with fake engines in virtual time. Every request finishes once with
the tokens that it has without a switch, and no engine works without its GPUs."""

import asyncio
from itertools import groupby

import pytest

from refrain.engines.rollout.interface import WeightSyncError
from refrain.engines.rollout.moves import Defer, Migrate, Race, Redraft, Reshape
from refrain.engines.simulate.clock import run_virtual
from refrain.schemas.counts import KVCounts
from refrain.schemas.timeline import Activity, MoveKind
from tests.rollout.fakes import FAST, SLOW, MoveAt, Recorder, request, weights
from tests.rollout.pools import (
    BASE,
    LONG,
    POOL,
    SHORT,
    TAIL,
    At,
    assert_well,
    finish_late,
    fleet,
    on,
    roll_out,
    submitted,
)

# The move


@pytest.mark.parametrize("move_kv", [True, False])
def test_pool_continues_in_another_layout(move_kv):
    engines, policy = fleet(), At((0.010, Reshape(0, 2, move_kv)))
    recorder, (outcome,) = roll_out(engines, [TAIL], [policy])
    assert_well(recorder, [TAIL], engines)
    assert outcome.moves.num_switches == 1
    assert policy.working()[:2] == [BASE, {4, 5}]
    assert {e.tp_degree for view in policy.views for e in view.engines} == {1, 2}
    moved = {name: submitted(engines, name) for name in ("p0", "p1", "p3")}
    assert [[index < 4 for index, _ in own] for own in moved.values()] == [[True, False]] * 3
    for own in moved.values():
        (_, first), (_, second) = own
        assert first.kv is None
        assert (second.kv is not None) == move_kv
    assert {move.kind for move in recorder.timeline.moves} == {MoveKind.RESHAPED}
    assert {(m.id.prompt_key, m.from_engine) for m in recorder.timeline.moves} == {
        ("p0", 0),
        ("p1", 1),
        ("p3", 3),
    }
    assert outcome.moves.num_migrated == 0
    assert sum(share.num_rollouts for share in outcome.shares[4:6]) == 3


@pytest.mark.parametrize("move_kv", [True, False])
def test_kv_is_saved_while_requests_continue(move_kv):
    """The new engines prepare to load the saved KV before the old ones give requests up."""
    engines, policy = fleet(), At((0.010, Reshape(0, 2, move_kv)))
    called = []
    for engine in engines:
        engine.copy_s = 0.005
        engine.calls = Called(engine.index, called)
    recorder, (outcome,) = roll_out(engines, [TAIL], [policy])
    assert_well(recorder, [TAIL], engines)
    assert outcome.moves.num_switches == 1
    ahead = {id.prompt_key: e.index for e in engines for id in e.saved_ahead}
    assert ahead == ({"p0": 0, "p1": 1, "p3": 3} if move_kv else {})
    expected = {engine.index: sorted(engine.expected) for engine in engines if engine.expected}
    assert expected == ({4: ["0", "1", "3"], 5: ["0", "1", "3"]} if move_kv else {})
    methods = [method for method, _ in groupby(method for _, method in called if method in WAY)]
    assert methods == (WAY if move_kv else WAY[2:])


def test_engines_report_while_kv_is_saved():
    """Engines in the pool and beside it still report finished requests, and moves still happen."""
    moved = Migrate(request("p9", 50).id, 3)
    engines, policy = fleet(), At((0.010, Reshape(0, 2)), (0.015, moved))
    for engine in engines[:4]:
        engine.copy_s = 0.020
    work = [*TAIL, on(2, "p8", 18), on(7, "p7", 20), on(7, "p9", 50)]
    recorder, (outcome,) = roll_out(engines, [work], [policy])
    assert_well(recorder, [work], engines)
    assert outcome.moves.num_switches == outcome.moves.num_migrated == 1
    at_work = [view for view in policy.views if any(e.engine < 4 for e in view.engines)]
    seen = [{id.prompt_key for e in view.engines for id in e.progress} for view in at_work]
    assert 0.028 < at_work[-1].elapsed_s < 0.034
    assert {"p0", "p7", "p8"} <= seen[0]
    assert not {"p7", "p8"} & seen[-1]
    assert [index in (3, 7) for index, _ in submitted(engines, "p9")] == [True, False, True]


@pytest.mark.parametrize(("dying", "num_later"), [(1, 1), (4, 0)])
def test_no_switch_is_made_when_an_engine_died_while_it_was_prepared(dying, num_later):
    """A later switch is made, except to a dead engine whose restart waits for its GPUs."""
    engines, policy = fleet(), At((0.010, Reshape(0, 2)), (0.035, Reshape(0, 2)))
    engines[dying].die_at_tick = 15
    for engine in engines[:4]:
        engine.copy_s = 0.020
    recorder, (outcome,) = roll_out(engines, [TAIL], [policy])
    assert_well(recorder, [TAIL], engines)
    assert outcome.moves.num_switches == num_later
    seen = {e.engine for view in policy.views if view.elapsed_s < 0.050 for e in view.engines}
    assert not {4, 5} & seen


def test_a_switch_is_prepared_once():
    """During the preparation the policy asks again and again, also for another layout."""
    asked = [(0.010 + 0.001 * i, Reshape(0, 2 + 2 * (i % 2))) for i in range(15)]
    engines, policy = fleet(), At(*asked)
    for engine in engines[:4]:
        engine.copy_s = 0.020
    recorder, (outcome,) = roll_out(engines, [TAIL], [policy])
    assert_well(recorder, [TAIL], engines)
    assert outcome.moves.num_switches == 1
    assert policy.working()[:2] == [BASE, {4, 5}]
    assert [engine.calls.count("precopy") for engine in engines[:4]] == [1, 1, 0, 1]


def test_duration_of_a_switch_is_recorded():
    """Parking takes 3 ms and waking 5 ms, of which 1 ms of saving does not count. The second switch
    takes 5 ms and 3 ms. The two engines loaded keys and values at 2 GB/s and 1 GB/s."""
    engines = fleet(wake_s=0.003)
    engines[5].wake_s = 0.005
    engines[1].kv_counts = KVCounts(export_s=0.001)
    engines[4].kv_counts = KVCounts(num_bytes_loaded=200, load_s=1e-7)
    engines[5].kv_counts = KVCounts(num_bytes_loaded=300, load_s=3e-7)
    policy = At((0.010, Reshape(0, 2)), (0.030, Reshape(0, 4)))
    recorder, (outcome,) = roll_out(engines, [TAIL], [policy])
    assert_well(recorder, [TAIL], engines)
    assert outcome.moves.num_switches == 2
    assert outcome.switches.control_s == pytest.approx((0.007, 0.008))
    assert sorted(outcome.switches.link_bytes_per_s) == pytest.approx([1e9, 2e9])


def test_switch_with_a_death_has_no_duration():
    engines = fleet(wake_s=0.003)
    recorder, (outcome,) = roll_out(engines, [TAIL], [At((0.010, Reshape(0, 2)))], [(4, "wake")])
    assert_well(recorder, [TAIL], engines)
    assert outcome.moves.num_switches == 1
    assert outcome.switches.control_s == ()


WAY = ["precopy", "expect_kv", "withdraw"]


class Called(list[str]):
    """Records the calls of one engine, and adds them to a list of all engines' calls."""

    def __init__(self, engine: int, of_all: list[tuple[int, str]]) -> None:
        self.engine, self.of_all = engine, of_all

    def append(self, method: str) -> None:
        self.of_all.append((self.engine, method))
        super().append(method)


def test_several_switches_up_and_down():
    engines = fleet(wake_s=0.002)
    times = [(0.005, 4), (0.015, 2), (0.025, 1), (0.035, 4)]
    policy = At(*((at_s, Reshape(0, tp)) for at_s, tp in times))
    recorder, (outcome,) = roll_out(engines, [TAIL], [policy])
    assert_well(recorder, [TAIL], engines)
    assert outcome.moves.num_switches == 4
    places = [m.to_engine for m in recorder.timeline.moves if m.id.prompt_key == "p1"]
    assert [engines[index].tp_degree for index in places] == [4, 2, 1, 4]


def test_requests_finished_during_a_switch_count_at_origin():
    engines, policy = fleet(), At((0.010, Reshape(0, 4)))
    engines[0].late = True
    recorder, _ = roll_out(engines, [TAIL], [policy])
    assert_well(recorder, [TAIL], engines)
    assert [(r.request.id.prompt_key, r.engine) for r in recorder.finished[1]][-3:] == [
        ("p0", 0),
        ("p3", 6),
        ("p1", 6),
    ]


@pytest.mark.parametrize("wake_s", [0.0, 0.015])
def test_finished_requests_are_not_started_again(wake_s):
    """Engine 0 reports that p0 finished after its pool is back in its base, or while it wakes."""
    engines = fleet(wake_s=wake_s)
    finish_late(engines[0], 0.050)
    engines[6].die_at_tick = 15 + int(2000 * wake_s)
    recorder, (outcome,) = roll_out(engines, [TAIL], [At((0.010, Reshape(0, 4)))])
    assert_well(recorder, [TAIL], engines)
    assert [index for index, _ in submitted(engines, "p0")] == [0]
    assert sum(share.num_rollouts for share in outcome.shares) == 4
    assert engines[6].num_starts == 2


def test_a_finished_request_ends_its_copy_in_the_pool():
    engines = fleet()
    finish_late(engines[0], 0.010)
    policies = [MoveAt("p0", 3, lambda id: Race(id, 2, SLOW)), At((0.012, Reshape(0, 4)))]
    recorder, (outcome,) = roll_out(engines, [TAIL], policies)
    assert_well(recorder, [TAIL], engines)
    assert [index for index, _ in submitted(engines, "p0")] == [0, 2]
    assert (outcome.moves.num_raced, outcome.moves.num_races_won) == (1, 0)
    assert outcome.moves.wasted_tokens > 5


def test_stage_waits_for_late_reports_of_the_last():
    """Engine 4 finished requests before the pool returned to its base, but reports them late."""
    engines = fleet()
    works = [[on(i, f"p{i}", n) for i, n in enumerate([60, 50, 30, 30])], [on(0, "q", 9, 2)]]
    finish_late(engines[4], 0.100)
    policy = At((0.010, Reshape(0, 2)), (0.020, Reshape(0, 1)))
    recorder, outcomes = roll_out(engines, works, [policy])
    assert_well(recorder, works, engines)
    assert [outcome.moves.num_switches for outcome in outcomes] == [2, 0]
    assert outcomes[0].shares[4].num_rollouts == 2


@pytest.mark.parametrize(
    "move", [Reshape(0, 1), Reshape(0, 3), Reshape(1, 2)], ids=["the same", "no layout", "no pool"]
)
def test_impossible_moves_are_ignored(move):
    engines = fleet()
    recorder, (outcome,) = roll_out(engines, [TAIL], [At((0.01, move))])
    assert_well(recorder, [TAIL], engines)
    assert outcome.moves.num_switches == 0
    assert all("wake" not in engine.calls for engine in engines)


def test_a_pool_with_nothing_left_keeps_its_layout():
    engines = fleet()
    works = [[on(0, "p0", SHORT), on(7, "p7", LONG)]]
    recorder, (outcome,) = roll_out(engines, works, [At((0.01, Reshape(0, 2)))])
    assert_well(recorder, works, engines)
    assert outcome.moves.num_switches == 0


def test_a_pool_that_is_not_all_at_one_stage_keeps_its_layout():
    engines, policy = fleet(), At((0.010, Reshape(0, 2)))
    works = [TAIL, [on(2, "q", LONG, 2)]]
    recorder, outcomes = roll_out(engines, works, [policy])
    assert_well(recorder, works, engines)
    assert [outcome.moves.num_switches for outcome in outcomes] == [0, 0]


def test_no_switch_while_an_engine_is_still_on_its_way():
    engines = fleet(wake_s=0.02)
    policy = At((0.005, Reshape(0, 2)), (0.010, Reshape(0, 4)))
    works = [[*TAIL, on(7, "p7", 90)]]
    recorder, (outcome,) = roll_out(engines, works, [policy])
    assert_well(recorder, works, engines)
    assert outcome.moves.num_switches == 1


def test_the_others_go_on_while_a_pool_switches():
    engines, policy = fleet(wake_s=0.05), At((0.010, Reshape(0, 4)))
    works = [[*TAIL, on(7, "p7", LONG)]]
    recorder, (outcome,) = roll_out(engines, works, [policy])
    assert_well(recorder, works, engines)
    assert 1000 * recorder.timeline.seconds(6, Activity.SWITCH) == pytest.approx(100, abs=2)
    assert outcome.finished_s - outcome.started_s == pytest.approx(0.060 + 0.100, abs=0.003)
    seen = [view.engines[0].progress for view in policy.views if len(view.engines) == 2]
    assert len(seen) > 25  # views with engine 7 and the waking engine 6
    assert {id.prompt_key: n for id, n in seen[0].items()} == {"p0": 11, "p1": 11, "p3": 11}


def test_nothing_goes_to_an_engine_on_standby():
    engines = fleet()
    policies = [
        At((0.02, Reshape(0, 4))),
        MoveAt("p7", 1, lambda id: Migrate(id, 5)),
        MoveAt("p7", 1, lambda id: Race(id, 4, FAST)),
        MoveAt("p7", 25, lambda id: Race(id, 2, FAST)),
        MoveAt("p1", 25, lambda id: Redraft(id, 1, FAST)),
    ]
    works = [[*TAIL, on(7, "p7", LONG)]]
    recorder, (outcome,) = roll_out(engines, works, policies)
    assert_well(recorder, works, engines)
    assert [index for index, _ in submitted(engines, "p7")] == [7]
    assert (outcome.moves.num_raced, outcome.moves.num_migrated, engines[1].redrafted) == (0, 0, [])


def test_drafting_and_counts_go_with_the_requests():
    engines = fleet()
    works = [[on(0, "p0", 90, drafting=FAST), on(1, "p1", 50)]]
    recorder, (outcome,) = roll_out(engines, works, [At((0.01, Reshape(0, 2)))])
    assert_well(recorder, works, engines)
    assert [r.drafting for _, r in submitted(engines, "p0")] == [FAST, FAST]
    assert [share.drafting.num_steps > 0 for share in outcome.shares][:6] == [True] * 6


def test_saved_kv_serves_only_the_switch():
    """A request that migrates, is raced or is deferred after the switch moves without it."""
    engines = fleet(wake_s=0.004)
    policies = [
        At((0.010, Reshape(0, 2))),
        MoveAt("p0", 0, lambda id: Migrate(id, 7)),
        MoveAt("p1", 15, lambda id: Race(id, 7, FAST)),
        MoveAt("p3", 20, lambda id: Defer(id, 7)),
    ]
    policies[1].decide = lambda view, decide=policies[1].decide: (
        decide(view) if 0.012 < view.elapsed_s < 0.015 else []
    )
    works = [[*TAIL[:2], on(2, "p2", 50), on(3, "p3", 50), on(7, "p7", 90)], [on(7, "q", 20, 2)]]
    recorder, _ = roll_out(engines, works, policies, min_rollouts=0)
    assert_well(recorder, works, engines)
    kinds = {move.kind for move in recorder.timeline.moves}
    assert kinds == {MoveKind.RESHAPED, MoveKind.MIGRATED, MoveKind.RACED, MoveKind.DEFERRED}
    assert any(r.kv for engine in engines for r in engine.submitted)
    assert not any(r.kv for engine in (*engines[:4], engines[7]) for r in engine.submitted)


# Back to the base, and from stage to stage


def test_the_pool_returns_when_it_has_nothing_left():
    engines, policy = fleet(), At((0.010, Reshape(0, 4)))
    works = [[*TAIL, on(7, "p7", 120)]]
    recorder, _ = roll_out(engines, works, [policy])
    assert_well(recorder, works, engines)
    assert policy.working() == [BASE, {6}, BASE]


def test_a_pool_that_is_done_begins_the_next_stage():
    engines, policy = fleet(), At((0.010, Reshape(0, 4)))
    works = [[*TAIL, on(7, "p7", 120)], [on(i, f"q{i}", LONG, 2) for i in (0, 1, 2, 3, 7)]]
    recorder, outcomes = roll_out(engines, works, [policy])
    assert_well(recorder, works, engines)
    begun = {
        (s.engine, s.label): s.start_s for s in recorder.timeline.spans if s.activity == "sync"
    }
    assert all(begun[i, "train/2"] < outcomes[0].finished_s - 0.04 for i in range(4))
    assert recorder.versions(2) == {1}
    assert [share.num_rollouts for share in outcomes[1].shares] == [1, 1, 1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("keep_parked_current", [True, False])
@pytest.mark.parametrize("loses_weights", [True, False])
def test_missing_weights_are_loaded(keep_parked_current, loses_weights):
    if keep_parked_current and loses_weights:
        pytest.skip("parked engines that lose their weights cannot keep them current")
    engines = fleet(loses_weights=loses_weights)
    policy = At((0.010, Reshape(0, 2)), (0.020, Reshape(0, 1)), (0.03, Reshape(0, 2)))

    async def run():
        recorder = Recorder(engines, pools=(POOL,), keep_parked_current=keep_parked_current)
        await recorder.coordinator.start()
        for version in (0, 1):
            await recorder.coordinator.load_weights(weights(version))
            await asyncio.wait_for(recorder.roll_out(version + 1, TAIL, policies=[policy]), 20)
        await asyncio.sleep(0.1)
        return recorder

    recorder = run_virtual(run())
    assert not any(engine.running for engine in engines)
    assert [engine.parked for engine in engines] == [False] * 4 + [True] * 3 + [False]
    assert recorder.versions(2) == {1}
    calls = [call for call in engines[4].calls if call in ("load_weights", "wake", "submit")]
    again = ["load_weights"] * loses_weights
    load = [] if keep_parked_current else ["load_weights"]
    kept = ["load_weights"] if keep_parked_current else []
    assert calls == [*kept, "wake", *load, "submit", "wake", *again, "submit", *kept]
    assert engines[6].calls.count("load_weights") == (2 if keep_parked_current else 0)


def test_parked_engines_take_the_weights_of_each_stage():
    engines, policy = fleet(sync_s=0.003), At((0.010, Reshape(0, 2)))
    works = [TAIL, [on(i, f"q{i}", LONG, 2) for i in range(4)]]
    recorder, _ = roll_out(engines, works, [policy])
    assert_well(recorder, works, engines)
    for engine in engines[4:7]:
        assert (engine.version, engine.calls.count("load_weights")) == (1, 2)


def test_a_wrong_engine_on_standby_fails_the_stage():
    engines = fleet()
    engines[6].wrong = True
    with pytest.raises(WeightSyncError, match="engine 6 differs"):
        roll_out(engines, [TAIL])


def test_a_deferred_request_waits_for_the_engines_that_stages_begin_on():
    engines = fleet()
    policies = [At((0.010, Reshape(0, 4))), MoveAt("p1", 20, lambda id: Defer(id, 6))]
    works = [TAIL, [on(0, "q", SHORT, 2)]]
    recorder, outcomes = roll_out(engines, works, policies, min_rollouts=0)
    assert_well(recorder, works, engines)
    assert len(outcomes[1].carried) == 1
    (moved,) = [r for r in recorder.finished[2] if r.request.deferred_from]
    assert moved.engine < 4


# Races


def test_copies_that_come_to_one_pool_are_one():
    """Engine 2 is ahead of engine 0: the pool keeps its copy, and the race is over."""
    engines = fleet()
    policies = [MoveAt("p0", 5, lambda id: Race(id, 2, FAST)), At((0.012, Reshape(0, 4)))]
    recorder, (outcome,) = roll_out(engines, [TAIL], policies)
    assert_well(recorder, [TAIL], engines)
    (again,) = [r for r in engines[6].submitted if r.id.prompt_key == "p0"]
    assert again.drafting is FAST
    assert (outcome.moves.num_raced, outcome.moves.num_races_won) == (1, 0)
    assert 5 <= outcome.moves.wasted_tokens <= 8


@pytest.mark.parametrize(("drafting", "winner"), [(SLOW, 6), (FAST, 7)])
def test_race_continues_over_a_switch(drafting, winner):
    engines = fleet()
    works = [[on(0, "p0", 60), on(1, "p1", 70), on(7, "p7", 70)]]
    policies = [MoveAt("p0", 5, lambda id: Race(id, 7, drafting)), At((0.012, Reshape(0, 4)))]
    recorder, (outcome,) = roll_out(engines, works, policies)
    assert_well(recorder, works, engines)
    (p0,) = [r for r in recorder.finished[1] if r.request.id.prompt_key == "p0"]
    assert p0.engine == winner
    assert (outcome.moves.num_raced, outcome.moves.num_races_won) == (1, int(winner == 7))
    assert outcome.moves.wasted_tokens > 10
