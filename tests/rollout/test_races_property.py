"""Property test: with any races and any deaths, every request finishes once."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.rollout.moves import Concede, Defer, Migrate, Race, Redraft
from refrain.schemas.rollout import DraftSetting
from tests.rollout.fakes import FAST, SLOW, FakeEngine, work
from tests.rollout.racing import assert_once, roll_out


class AnyMoves:
    """Asks for random moves, possible or not, many of them races."""

    def __init__(self, seed):
        self.random = Random(seed)

    def decide(self, view):
        ids = [id for engine in view.engines for id in engine.progress]
        if not ids or self.random.random() < 0.4:
            return []
        return [self._move(ids) for _ in range(self.random.randint(1, 3))]

    def _move(self, ids):
        id, engine = self.random.choice(ids), self.random.randrange(3)
        drafting = self.random.choice([FAST, SLOW, DraftSetting("fast", 9, coupled=False)])
        kind = self.random.choice([Race, Race, Concede, Redraft, Migrate, Defer])
        return kind(id, engine, drafting) if kind in (Race, Redraft) else kind(id, engine)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.lists(st.integers(1, 25), max_size=9), min_size=1, max_size=4),
    deaths=st.lists(st.none() | st.integers(1, 25), min_size=3, max_size=3),
    dies_in=st.none() | st.sampled_from(["copy", "redraft", "withdraw", "submit", "next_events"]),
    late=st.booleans(),
    spare=st.none() | st.integers(0, 4),
    lost=st.sets(st.integers(0, 20), max_size=3),
    delays_s=st.tuples(st.sampled_from([0.0, 0.004]), st.sampled_from([0.0, 0.004])),
    moves_kv=st.booleans(),
)
def test_any_races_and_deaths_finish_every_sample_once(
    seed, lengths, deaths, dies_in, late, spare, lost, delays_s, moves_kv
):
    copy_s, submit_s = delays_s
    about = {"late": late, "copy_s": copy_s, "submit_s": submit_s}
    engines = [
        FakeEngine(i, die_at_tick=tick, node_id="aab"[i], **about) for i, tick in enumerate(deaths)
    ]
    engines[seed % 3].dies_in = dies_in
    works = [work(step, own, 3) for step, own in enumerate(lengths, 1)]
    min_rollouts = None if spare is None else max(0, min(map(len, lengths)) - spare)
    policies = [AnyMoves(seed)]
    recorder, outcomes = roll_out(
        engines, works, policies, min_rollouts, 9, lost, moves_kv=lambda *_: moves_kv
    )
    assert_once(recorder, works, engines)
    assert recorder.order == list(range(1, len(works) + 1))
    expected = {(s, f"p{i}"): n for s, ns in enumerate(lengths, 1) for i, n in enumerate(ns)}
    for r in (r for rollouts in recorder.finished.values() for r in rollouts):
        origin, step = r.request.origin_step, r.request.id.step
        assert len(r.generated.token_ids) == expected[origin, r.request.id.prompt_key]
        assert sum(span.num_tokens for span in r.generated.spans) == len(r.generated.token_ids)
        versions = list(dict.fromkeys(s.policy_version for s in r.generated.spans))
        assert versions in ([step - 1], [origin - 1, step - 1])
    for outcome in outcomes:
        assert outcome.moves.num_races_won <= outcome.moves.num_raced
        assert outcome.moves.num_raced or not outcome.moves.wasted_tokens
