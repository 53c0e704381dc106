"""Algorithm 3: idle engines race the last requests."""

import timeit
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.rollout.moves import Concede, EngineView, Race, RolloutView
from refrain.engines.specactor.best_of_n import LEAD_TOKENS, BestOfN, Racer, assign_races
from refrain.engines.specactor.contenders import Contender, Contenders, Raced, rank
from refrain.schemas.rollout import DraftProgress
from tests.specactor.views import LARGE, NGRAM, SMALL, drafted, request, view_of

DRAFTERS = ("small", "ngram", "large")
METHODS = (SMALL, NGRAM, LARGE)


def contender(index, acceptance, drafters=("small",), engines=(0,)):
    return Contender(request(index), acceptance, frozenset(drafters), frozenset(engines))


contenders = st.lists(
    st.builds(
        contender,
        st.integers(0, 1000),
        st.none() | st.sampled_from([0.0, 0.2, 0.5, 0.9]),
        st.sets(st.sampled_from(DRAFTERS)),
        st.sets(st.integers(0, 9), min_size=1, max_size=3),
    ),
    max_size=12,
    unique_by=lambda contender: contender.id,
)
racers = st.lists(
    st.one_of(
        st.builds(Racer, st.integers(0, 9), st.none(), st.just(0)),
        st.builds(Racer, st.integers(0, 9), st.sampled_from(DRAFTERS), st.integers(1, 4)),
    ),
    max_size=6,
    unique_by=lambda racer: racer.engine,
)


def races_of(contenders, racers, settings, max_batch) -> list[Race]:
    """Return the races of these requests, in any order."""
    lacked = {d for d in settings if any(d not in one.drafters for one in contenders)}
    ranked = sorted(contenders, key=rank)
    return assign_races(lambda _: ranked, lacked, racers, settings, max_batch)


def assigned(contenders, racers, max_batch) -> list[tuple]:
    """Return (request, drafter, engine) of each race."""
    races = races_of(contenders, racers, dict(zip(DRAFTERS, METHODS, strict=True)), max_batch)
    return [(race.id, race.drafting.drafter, race.to_engine) for race in races]


def algorithm_3(contenders, racers, max_batch) -> set[tuple]:
    """Follow the paper line by line: it goes method by method, not request by request."""
    workers = {d: [r.engine for r in racers if r.drafter == d] for d in DRAFTERS}
    useful = [d for d in DRAFTERS if any(d not in c.drafters for c in contenders)]
    for racer in sorted(racers, key=lambda r: r.engine):
        if racer.drafter is None and useful:
            fewest = min(useful, key=lambda d: len(workers[d]))
            workers[fewest].append(racer.engine)
    load = {racer.engine: racer.load for racer in racers}
    ranked = sorted(
        contenders,
        key=lambda c: (c.acceptance is None, c.acceptance or 0.0, c.id.prompt_key),
    )
    found = set()
    for d in DRAFTERS:
        for c in ranked:
            for w in sorted(workers[d]):
                if d not in c.drafters and w not in c.engines and load[w] < max_batch:
                    found.add((c.id, d, w))
                    load[w] += 1
                    break
    return found


def test_a_request_stays_on_its_node_where_it_can():
    racers = [Racer(engine, None, 0, node) for engine, node in ((5, "a"), (6, "b"), (7, None))]
    on_b = [replace(contender(i, 0.1 * i), nodes=frozenset("b")) for i in range(3)]
    methods = {"ngram": NGRAM}
    races = races_of(on_b, racers, methods, 1)
    assert [race.to_engine for race in races] == [6, 5, 7]
    unknown = [replace(one, nodes=frozenset({None})) for one in on_b]
    assert [race.to_engine for race in races_of(unknown, racers[:2], methods, 2)] == [5, 5, 6]
    progress = {request(0): 100}
    engines = (
        EngineView(0, progress, node_id="b"),
        *(EngineView(r.engine, {}, node_id=r.node) for r in racers),
    )
    (race,) = BestOfN([NGRAM], initial="small", max_batch=8).decide(RolloutView(1.0, engines, 0, 1))
    assert race.to_engine == 6


@settings(deadline=None)
@given(contenders, racers, st.integers(1, 4))
def test_the_paper_s_algorithm(contenders, racers, max_batch):
    """Going request by request gives the same races as method by method: no two methods share an
    engine."""
    found = assigned(contenders, racers, max_batch)
    assert len(set(found)) == len(found)
    assert set(found) == algorithm_3(contenders, racers, max_batch)


@settings(deadline=None)
@given(contenders, racers, st.integers(1, 4))
def test_every_assignment_keeps_the_limits(contenders, racers, max_batch):
    found = assigned(contenders, racers, max_batch)
    by_id = {contender.id: contender for contender in contenders}
    load = Counter({racer.engine: racer.load for racer in racers})
    methods = {racer.engine: {racer.drafter} - {None} for racer in racers}
    for id, drafter, engine in found:
        load[engine] += 1
        methods[engine].add(drafter)
        assert drafter not in by_id[id].drafters
        assert engine not in by_id[id].engines
    assert all(load[r.engine] <= max(max_batch, r.load) for r in racers)
    assert all(len(drafters) <= 1 for drafters in methods.values())
    assert all(times == 1 for times in Counter((id, d) for id, d, _ in found).values())
    assert list(found) == assigned(contenders[::-1], racers[::-1], max_batch)


def policy(max_batch=2):
    return BestOfN(METHODS, initial="small", max_batch=max_batch)


BUSY = {0: {0: drafted(0.6), 1: drafted(0.3)}, 1: {2: drafted(0.5)}}


def test_nothing_while_all_are_busy():
    assert policy().decide(view_of(BUSY)) == []


def test_freed_engines_race_and_the_moves_carry_settings():
    assert policy().decide(view_of({**BUSY, 2: {}, 3: {}})) == [
        Race(request(1), 2, NGRAM),
        Race(request(1), 3, LARGE),
        Race(request(2), 2, NGRAM),
        Race(request(2), 3, LARGE),
    ]


def test_a_view_that_lags_behind_repeats_no_race():
    decider, view = policy(), view_of({**BUSY, 2: {}, 3: {}})
    assert len(decider.decide(view)) == 4
    assert decider.decide(view) == []


def test_a_raced_engine_with_room_takes_more_of_its_method_only():
    decider = policy(max_batch=3)
    decider.decide(view_of({**BUSY, 2: {}}))
    late = {**BUSY, 4: {7: drafted(0.1)}}
    raced = {i: drafted(0.4, NGRAM) for i in (0, 1, 2)}
    del raced[0]
    assert decider.decide(view_of({**late, 2: raced})) == [], "three races are on their way"
    without_0 = {0: {1: BUSY[0][1]}, 1: BUSY[1], 4: late[4]}
    assert decider.decide(view_of({**without_0, 2: raced})) == [Race(request(7), 2, NGRAM)]


def test_an_engine_that_has_raced_is_freed_again():
    decider = policy()
    decider.decide(view_of({0: {0: drafted(0.5)}, 1: {}}))
    moves = decider.decide(view_of({2: {1: drafted(0.5)}, 1: {}}))
    assert moves == [Race(request(1), 1, NGRAM)]


def test_an_engine_with_requests_of_its_own_does_not_race():
    moves = policy(max_batch=9).decide(view_of({**BUSY, 2: {3: None}, 5: {}}))
    assert {move.to_engine for move in moves} == {5}


def test_the_drafter_of_a_silent_engine_is_the_initial_one():
    (move,) = policy().decide(view_of({0: {0: None}, 1: {}}))
    assert move.drafting.drafter == "ngram"


def test_request_without_drafter_may_get_any():
    (move,) = policy().decide(view_of({0: {0: DraftProgress(None)}, 1: {}}))
    assert move.drafting is SMALL


def test_a_raced_request_counts_by_its_best_copy():
    decider = policy(max_batch=1)
    decider.decide(view_of({0: {0: drafted(0.2)}, 1: {}}))
    now = {0: {0: drafted(0.2), 1: drafted(0.3)}, 1: {0: drafted(0.9, NGRAM)}, 2: {}}
    assert [move.id for move in decider.decide(view_of(now))] == [request(1)]


def with_tokens(*engines: tuple[int, dict[int, int]]) -> RolloutView:
    """Return a view from each engine's requests and their response tokens."""
    views = tuple(EngineView(e, {request(i): num for i, num in of.items()}) for e, of in engines)
    return RolloutView(0.0, views, 0, 100)


def test_where_a_copy_leads_clearly_the_origin_is_left():
    decider = policy()
    assert len(decider.decide(with_tokens((0, {0: 100, 1: 100}), (1, {})))) == 2
    near = LEAD_TOKENS + 99
    assert decider.decide(with_tokens((0, {0: 100, 1: 100}), (1, {0: near, 1: 50}))) == []
    ahead = with_tokens((0, {0: 100, 1: 900}), (1, {0: near + 1, 1: 100}))
    assert decider.decide(ahead) == [Concede(request(0), 0)]
    assert decider.decide(ahead) == [], "the move is on its way"


def test_the_drafter_that_was_left_is_not_tried_again():
    decider = policy()
    decider.decide(with_tokens((0, {0: 100}), (1, {})))
    assert decider.decide(with_tokens((0, {0: 100}), (1, {0: 1000}))) == [Concede(request(0), 0)]
    later = with_tokens((0, {}), (1, {0: 1100}))
    assert [move.drafting for move in decider.decide(later)] == [LARGE]
    assert decider.decide(with_tokens((0, {}), (1, {0: 1100}), (2, {}))) == []


def test_where_lengths_are_known_the_most_verifications_to_come_go_first():
    """The lowest acceptance alone does not decide, because such a request may end soon. Without
    lengths it does decide."""
    to_come = {request(0): 100.0, request(1): 900.0, request(2): 1200.0, request(3): 500.0}
    told = {0: drafted(0.1), 1: drafted(0.5), 2: drafted(0.9), 3: None}

    def raced(lengths) -> list:
        decider = BestOfN([NGRAM], initial="small", max_batch=2, to_come=lengths)
        return [move.id for move in decider.decide(view_of({0: told, 1: {}}, num_tokens=70))]

    seen = []

    def known(so_far):
        seen.append(dict(so_far))
        return to_come

    # A window of 4 gives 1.9 tokens a verification at 0.5, and 4.1 at 0.9; 1 if not reported.
    assert raced(known) == [request(3), request(1)]
    assert seen == [dict.fromkeys(to_come, 70)]
    assert raced(None) == [request(0), request(1)]


def test_raced_request_continues_as_its_best_copy():
    """It has the tokens of its longest copy and the pace of the copy with the best acceptance."""
    seen = []

    def to_come(so_far):
        seen.append(dict(so_far))
        return {request(0): 1000.0, request(1): 600.0}

    decider = BestOfN(METHODS, initial="small", max_batch=1, to_come=to_come)
    decider.decide(view_of({0: {0: drafted(0.1)}, 1: {}}))
    raced = EngineView(1, {request(0): 300}, {request(0): drafted(0.9, NGRAM)})
    view = view_of({0: {0: drafted(0.1), 1: drafted(0.5)}, 2: {}}, num_tokens=90)
    moves = decider.decide(replace(view, engines=(*view.engines, raced)))
    assert seen[-1] == {request(0): 300}
    assert dict.fromkeys(map(request, (0, 1)), 90) in seen
    assert [move.id for move in moves] == [request(1)]


events = st.lists(
    st.tuples(st.sampled_from(["apply", "finish", "look"]), st.integers(0, 30)), max_size=60
)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12),
    st.lists(st.sampled_from([None, 0.1, 0.5, 0.9]), min_size=12, max_size=12),
    st.integers(1, 3),
    events,
)
def test_a_rollout_to_its_end(homes, rates, max_batch, events):
    """Requests finish and races arrive late. No request races twice by one method, and no race
    overfills an engine."""
    decider = policy(max_batch)
    engines = {e: {i: drafted(rates[i]) for i, h in enumerate(homes) if h == e} for e in range(8)}
    on_its_way, raced = [], set()
    for what, which in events:
        if what == "finish" and (left := sorted({i for of in engines.values() for i in of})):
            done = left[which % len(left)]
            engines = {e: {i: t for i, t in of.items() if i != done} for e, of in engines.items()}
            on_its_way = [move for move in on_its_way if move.id != request(done)]
        elif what == "apply" and on_its_way:
            move = on_its_way.pop(which % len(on_its_way))
            engines[move.to_engine][index_of(move)] = drafted(0.4, move.drafting)
        moves = decider.decide(view_of(engines))
        on_its_way += moves
        for move in moves:
            at_home = engines[homes[index_of(move)]]
            assert isinstance(move, Race)
            assert index_of(move) in at_home, "a race must not move the original"
            assert move.drafting != at_home[index_of(move)].setting
            assert (move.id, move.drafting.drafter) not in raced
            raced.add((move.id, move.drafting.drafter))
        for engine, of in engines.items():
            coming = [move for move in on_its_way if move.to_engine == engine]
            methods = {told.setting for told in of.values()} | {m.drafting for m in coming}
            if coming:
                assert len(of) + len(coming) <= max_batch
                assert len(methods) == 1


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.dictionaries(
                st.integers(0, 9), st.sampled_from([None, *map(drafted, (0.1, 0.5, 0.9))])
            ),
            st.integers(0, 3),
        ),
        max_size=12,
    ),
    st.sets(st.integers(0, 9), max_size=3),
)
def test_what_is_remembered_changes_no_order(changes, raced):
    """Engine after engine gets other requests, or leaves. The order is that of a new look."""

    def to_come(generated):
        return {id: 1000.0 - num for id, num in generated.items()}

    def order(contenders, view):
        contenders.update(view)
        found = contenders.order({request(i): Raced({9: "large"}) for i in raced})
        all_wanted = set(DRAFTERS)
        return list(found.first(all_wanted)), found.lacked(DRAFTERS)

    kept, engines = Contenders("small", to_come), {}
    for at, (engine, of, num_engines) in enumerate(changes):
        (engines[engine],) = view_of({engine: of}, num_tokens=10 * at).engines
        engines = {i: e for i, e in engines.items() if i <= max(engine, num_engines)}
        view = RolloutView(0.0, tuple(engines.values()), 0, 10)
        ranked, lacked = order(kept, view)
        assert (ranked, lacked) == order(Contenders("small", to_come), view)
        ids = {id for e in engines.values() for id in e.progress}
        assert {one.id for one in ranked} == ids
        assert len(ranked) == len(ids)
        assert lacked == {d for d in DRAFTERS if any(d not in one.drafters for one in ranked)}


def test_nobody_is_read_for_a_method_that_all_have():
    contenders = Contenders("small", None)
    contenders.update(view_of({e: {9 * e + i: drafted(0.5) for i in range(9)} for e in range(3)}))
    order, wanted = contenders.order({request(4): Raced({1: "ngram"})}), {"ngram"}
    assert [one.id for one in order.first({"small"})] == [request(4)]
    reading = order.first(wanted)
    next(reading)
    wanted.clear()
    assert len(list(reading)) < 9, "only what was read ahead, and the request that races"


def test_a_decision_among_ten_thousand_is_quick():
    """64 engines. One has changed, and one has room for races."""
    decider = BestOfN(METHODS, initial="small", max_batch=8)
    home = {e: {160 * e + i: drafted((i % 90) / 100) for i in range(160)} for e in range(1, 64)}
    engines = list(view_of({0: {}, **home}).engines)

    def decide() -> int:
        return len(decider.decide(RolloutView(0.0, tuple(engines), 0, 10_000)))

    assert decide() == 8

    def once():
        # One of its races ends elsewhere, so that a place is free.
        done, *others = decider._races
        engines[0] = EngineView(0, dict.fromkeys(others, 1))
        engines[1:] = [
            replace(e, progress={id: n for id, n in e.progress.items() if id != done})
            if done in e.progress
            else e
            for e in engines[1:]
        ]
        engines[5] = replace(engines[5])
        assert decide() == 1

    assert min(timeit.repeat(once, number=1, repeat=8)) < 5e-3


def index_of(move: Race) -> int:
    return int(move.id.prompt_key.removeprefix("prompt-"))


@pytest.mark.parametrize(("methods", "max_batch"), [((SMALL, SMALL), 4), (METHODS, 0)])
def test_two_settings_of_one_drafter_and_no_batch_are_refused(methods, max_batch):
    with pytest.raises(ValueError, match="one setting"):
        BestOfN(methods, initial=None, max_batch=max_batch)
