"""Property tests with two pools and one more engine. With any moves and any deaths, every request
finishes once with its tokens, and each pool ends in its base layout."""

import asyncio
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from refrain.engines.rollout.moves import Defer, Migrate, Race, Redraft, Reshape
from refrain.engines.simulate.clock import run_virtual
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import DraftSetting
from tests.rollout.fakes import FAST, SLOW, Recorder, weights
from tests.rollout.pools import assert_once, fleet, on

POOLS = (Pool(0, {1: (0, 1, 2, 3), 2: (4, 5), 4: (6,)}), Pool(5, {2: (7, 8), 4: (9,)}))
PARKED = [4, 5, 6, 9]
BEGIN = [0, 1, 2, 3, 7, 8, 10]
"""Engines that stages begin on."""
METHODS = ["submit", "withdraw", "copy", "redraft", "park", "wake", "load_weights", "next_events"]


class AnyMoves:
    """Asks for random moves, possible or not, many of them layout switches."""

    def __init__(self, seed, num_engines=11):
        self.random, self.num_engines = Random(seed), num_engines

    def decide(self, view):
        ids = [id for engine in view.engines for id in engine.progress]
        if not ids or self.random.random() < 0.6:
            return []
        return [self._move(ids) for _ in range(self.random.randint(1, 3))]

    def _move(self, ids):
        id, engine = self.random.choice(ids), self.random.randrange(self.num_engines)
        drafting = self.random.choice([FAST, SLOW, DraftSetting("fast", 9, coupled=False)])
        kind = self.random.choice([Reshape, Reshape, Reshape, Race, Race, Redraft, Migrate, Defer])
        if kind is Reshape:
            pool, tp_degree = self.random.choice([0, 0, 5]), self.random.choice([1, 2, 4])
            return Reshape(pool, tp_degree, self.random.random() < 0.5)
        return kind(id, engine, drafting) if kind in (Race, Redraft) else kind(id, engine)


def engines_of(wake_s, sync_s, keep):
    """Return engines that take `sync_s` to load weights, to copy requests and to take some."""
    times = {"wake_s": wake_s, "sync_s": sync_s, "copy_s": sync_s, "submit_s": sync_s}
    engines = fleet(POOLS, loses_weights=not keep, **times)
    for engine in engines:
        engine.node_id = "one"
    return engines


def any_kv(from_tp, to_tp, context_tokens):
    """Let some requests take keys and values along."""
    del from_tp, to_tp
    return context_tokens % 2 == 0


def works_of(lengths, random):
    return [
        [on(random.choice(BEGIN), f"p{i}", n, step) for i, n in enumerate(own)]
        for step, own in enumerate(lengths, 1)
    ]


def assert_ended(recorder, works, engines):
    assert_once(recorder, works, engines)
    assert recorder.order == list(range(1, len(works) + 1))
    parked = [e.index for e in engines if e.parked and e.has_place]
    assert parked == [index for index in PARKED if engines[index].has_place]


slow = {"wake_s": st.sampled_from([0.0, 0.002, 0.01]), "sync_s": st.sampled_from([0.0, 0.003])}
lengths = st.lists(st.lists(st.integers(1, 40), max_size=12), min_size=1, max_size=3)
deaths = st.lists(st.none() | st.integers(1, 40), min_size=11, max_size=11)
dies_in = st.lists(st.tuples(st.integers(0, 10), st.sampled_from(METHODS)), max_size=3)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=lengths,
    deaths=st.just([None] * 11) | deaths,
    dies_in=dies_in,
    late=st.lists(st.integers(0, 10), max_size=3),
    spare=st.none() | st.integers(0, 4),
    keep=st.booleans(),
    lost=st.sets(st.integers(0, 20), max_size=3),
    **slow,
)
@example(  # A stage ends after a restart, before the coordinator has read the report of it.
    seed=2,
    lengths=[[1, 23, 2]],
    deaths=[None, None, None, 13, None, None, None, None, None, 3, None],
    dies_in=[],
    late=[],
    spare=None,
    keep=False,
    lost=set(),
    wake_s=0.0,
    sync_s=0.0,
)
@example(  # The pool switches back while an engine waits for a restart before it wakes.
    seed=270,
    lengths=[[1, 2, 4, 1, 1, 1, 1, 5, 2, 7, 3, 4]],
    deaths=[None, None, None, 6, None, None, None, None, None, 1, None],
    dies_in=[],
    late=[],
    spare=None,
    keep=True,
    lost=set(),
    wake_s=0.0,
    sync_s=0.003,
)
@example(  # The same while the restart of an engine on standby waits for another restart.
    seed=270,
    lengths=[[1, 1, 4, 12, 2, 2, 2, 2, 11, 2, 6, 7]],
    deaths=[None, None, None, 23, None, 32, None, None, None, 10, 1],
    dies_in=[],
    late=[0],
    spare=None,
    keep=False,
    lost=set(),
    wake_s=0.002,
    sync_s=0.003,
)
@example(  # A request finishes while its copy is assigned to a dead engine.
    seed=815,
    lengths=[[1, 3, 2, 4, 2, 2, 1, 1, 6, 6, 3, 6]],
    deaths=[5, 2, 2, 1, 25, None, None, None, None, None, None],
    dies_in=[],
    late=[],
    spare=None,
    keep=False,
    lost=set(),
    wake_s=0.01,
    sync_s=0.0,
)
def test_any_moves_and_deaths_finish_every_sample_once(
    seed, lengths, deaths, dies_in, late, spare, keep, lost, wake_s, sync_s
):
    engines = engines_of(wake_s, sync_s, keep)
    works = works_of(lengths, Random(seed))
    min_rollouts = None if spare is None else max(0, min(map(len, lengths)) - spare)

    async def run():
        recorder = Recorder(engines, 30, lost, pools=POOLS, keep_parked_current=keep)
        await recorder.coordinator.start()
        for engine, tick in zip(engines, deaths, strict=True):
            engine.die_at_tick = tick
            engine.late = engine.index in late
        for index, method in dies_in:
            engines[index].dies_in = method
        stages = [
            recorder.roll_out(
                step, own, policies=[AnyMoves(seed)], min_rollouts=min_rollouts, moves_kv=any_kv
            )
            for step, own in enumerate(works, 1)
        ]
        outcomes = await asyncio.wait_for(asyncio.gather(*stages), 20)
        await asyncio.sleep(0.1)
        return recorder, outcomes

    recorder, outcomes = run_virtual(run())
    assert_ended(recorder, works, engines)
    for outcome in outcomes:
        assert outcome.moves.num_races_won <= outcome.moves.num_raced
        assert outcome.moves.num_raced or not outcome.moves.wasted_tokens


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), lengths=lengths, dies_in=dies_in, keep=st.booleans(), **slow)
@example(  # An engine on standby dies before the first stage.
    seed=0, lengths=[[]], dies_in=[(4, "load_weights")], keep=True, wake_s=0.0, sync_s=0.0
)
@example(  # It restarts on GPUs whose engines then return to them without a stage.
    seed=0, lengths=[[], [5]], dies_in=[(4, "load_weights")], keep=True, wake_s=0.0, sync_s=0.0
)
@example(  # The pool switches back while an engine waits for a restart before it wakes.
    seed=37, lengths=[[1, 10, 8]], dies_in=[(0, "park")], keep=False, wake_s=0.002, sync_s=0.0
)
def test_the_same_with_weights_between_stages(seed, lengths, dies_in, keep, wake_s, sync_s):
    engines = engines_of(wake_s, sync_s, keep)
    works = works_of(lengths, Random(seed))

    async def run():
        recorder = Recorder(engines, 30, pools=POOLS, keep_parked_current=keep)
        await recorder.coordinator.start()
        for index, method in dies_in:
            engines[index].dies_in = method
        for step, own in enumerate(works, 1):
            await recorder.coordinator.load_weights(weights(step - 1))
            stage = recorder.roll_out(step, own, policies=[AnyMoves(seed)], moves_kv=any_kv)
            await asyncio.wait_for(stage, 20)
        await asyncio.sleep(0.1)
        return recorder

    recorder = run_virtual(run())
    assert_ended(recorder, works, engines)


NODES = ((0, 1, 2, 3, 4, 5, 6), (7, 8, 9), (10,))


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=lengths,
    lost_at_ms=st.permutations(NODES)
    .map(lambda nodes: nodes[:2])
    .flatmap(
        lambda nodes: st.fixed_dictionaries(
            {nodes[0]: st.integers(0, 60)}, optional={nodes[1]: st.integers(0, 60)}
        )
    ),
    keep=st.booleans(),
    spare=st.none() | st.integers(0, 4),
    **slow,
)
@example(  # An engine that woke without need gets a request while engines on its GPUs delay it.
    seed=4200,
    lengths=[[9, 12, 17, 25, 4, 2, 20, 28, 7, 1, 25, 26], []],
    lost_at_ms={(0, 1, 2, 3, 4, 5, 6): 17},
    keep=False,
    spare=None,
    wake_s=0.0,
    sync_s=0.0,
)
def test_any_lost_nodes_finish_every_sample_once(
    seed, lengths, lost_at_ms, keep, spare, wake_s, sync_s
):
    """Up to two of three nodes are lost. Their engines are found dead one by one."""
    engines = engines_of(wake_s, sync_s, keep)
    works, random = works_of(lengths, Random(seed)), Random(seed)
    min_rollouts = None if spare is None else max(0, min(map(len, lengths)) - spare)

    async def run():
        recorder = Recorder(engines, 30, pools=POOLS, keep_parked_current=keep)
        await recorder.coordinator.start()
        for node, at_ms in lost_at_ms.items():
            for index in node:
                at_s = (at_ms + random.randrange(16)) / 1000 + 1e-4
                asyncio.get_running_loop().call_later(at_s, engines[index].lose_node)
        stages = [
            recorder.roll_out(
                step, own, policies=[AnyMoves(seed)], min_rollouts=min_rollouts, moves_kv=any_kv
            )
            for step, own in enumerate(works, 1)
        ]
        await asyncio.wait_for(asyncio.gather(*stages), 20)
        await asyncio.sleep(0.2)
        # The remaining engines also run a stage that was planned for all engines.
        again = [on(index, f"q{index}", 5, len(works) + 1) for index in BEGIN]
        await asyncio.wait_for(recorder.roll_out(len(works) + 1, again), 20)
        await asyncio.sleep(0.1)
        return recorder, [*works, again]

    recorder, works = run_virtual(run())
    assert_ended(recorder, works, engines)
    lost = {index for node in lost_at_ms for index in node}
    assert not lost & {r.engine for r in recorder.finished[len(works)]}
    assert set(recorder.coordinator.living) == set(BEGIN) - lost
