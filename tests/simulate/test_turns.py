"""Recorded conversations in the simulation: turns, waits and observed tokens."""

import asyncio

import pytest

from refrain.engines.simulate.batching import VirtualBatch
from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.cluster import simulate_step
from refrain.engines.simulate.engine import VirtualEngine
from refrain.engines.simulate.lengths import TraceLengths
from refrain.engines.simulate.member import Passes, SimulatedRequest
from refrain.engines.simulate.trace import from_store
from refrain.engines.store.store import Store
from refrain.schemas.rollout import LengthHistory, RequestId, RolloutRequest, Split, Turn
from refrain.schemas.simulate import ClusterLayout
from refrain.schemas.weights import PolicyWeights
from tests.simulate.latencies import LinearLatency
from tests.simulate.test_history import LONG, UNGATED, replayed, trace_of
from tests.store.test_store import add_rollouts
from tests.store.test_turns import talk

LATENCY = LinearLatency(0.01, 1e-4, 1e-6, prefill_token_s=1e-5)
TURNS = (Turn(20, 7, 5.0), Turn(1, 0, 0.0), Turn(30))
PROMPT = 10
CONTEXTS = (PROMPT, PROMPT + 27, PROMPT + 28)
"""Context of each turn when it begins."""
ID = RequestId(Split.TRAIN, 1, "a", 0)
REQUEST = RolloutRequest(ID, (0,) * PROMPT, 0, 1000)


def decode_s(context: int, num_tokens: int, batch: int = 1) -> float:
    """Return the seconds of a turn's steps after its prefill, which gives the first token."""
    return sum(LATENCY.decode_s(1, batch, context + n) for n in range(1, num_tokens))


def turns_s(turns=TURNS) -> list[float]:
    """Return the seconds of each turn. A later one prefills what it observed, and the token before,
    which has no keys and values."""
    news = (PROMPT, *((turn.num_observed or 0) + 1 for turn in turns[:-1]))
    return [
        LATENCY.prefill_s(1, 1, new) + decode_s(context, turn.num_sampled)
        for turn, context, new in zip(turns, CONTEXTS, news, strict=True)
    ]


def batch_of(*members, capacity=None) -> VirtualBatch:
    batch = VirtualBatch(1, LATENCY, 4, capacity)
    batch.add(members, 0.0)
    return batch


def test_a_conversation_takes_its_turns_and_its_waits():
    batch = batch_of(SimulatedRequest(REQUEST, 51, 0, 0.0, turns=TURNS))
    batch.advance(1.0)
    assert batch.ids() == [ID], "it waits"
    assert batch.next_s == pytest.approx(turns_s()[0] + 5.0)
    batch.advance(100.0)
    (done,) = batch.finished
    assert done.finished_s == pytest.approx(sum(turns_s()) + 5.0)
    assert done.context(0) == PROMPT + 51 + 7
    assert len(batch) == 0


def test_others_have_the_batch_for_themselves_while_it_waits():
    other = RolloutRequest(RequestId(Split.TRAIN, 1, "b", 0), (0,) * PROMPT, 0, 1000)
    batch = batch_of(
        SimulatedRequest(REQUEST, 51, 0, 0.0, turns=TURNS), SimulatedRequest(other, 300, 0, 0.0)
    )
    batch.advance(100.0)
    sizes = [(one.batch, one.prefill) for one in batch.intervals]
    # The other decodes alone. The next turn has a single token, so two prefills follow each other.
    assert sizes == [(2, True), (2, False), (1, False), (1, True), (1, False)]
    waited = batch.intervals[2]
    assert waited.end_s - waited.start_s == pytest.approx(300 * 0.01, rel=0.1)


def test_observed_tokens_must_fit_into_the_kv_cache():
    with pytest.raises(ValueError, match=f"needs {PROMPT + 51 + 7} tokens of KV cache"):
        batch_of(SimulatedRequest(REQUEST, 51, 0, 0.0, turns=TURNS), capacity=PROMPT + 51)


@pytest.mark.parametrize("moved_s", [0.1, 2.0, 5.4])
def test_a_conversation_moves_in_a_turn_and_while_it_waits(moved_s):
    """On the other engine it waits as long, and its whole context is prefilled once."""
    engines = [VirtualEngine(i, 1, LATENCY, {ID: 51}, turns={ID: TURNS}) for i in range(2)]

    async def run():
        for engine in engines:
            await engine.load_weights(PolicyWeights(0, b"", ()))
        await engines[0].submit([REQUEST])
        await asyncio.sleep(moved_s)
        (left,) = await engines[0].withdraw([ID])
        await engines[1].submit([left])
        (rollout,) = (await engines[1].next_events()).finished
        return left.generated, rollout

    left, rollout = run_virtual(run())
    assert bool(left.turns and left.turns[-1].num_observed is None) == (moved_s == 2.0)
    generated = rollout.generated
    assert generated.turns == TURNS
    assert (generated.num_sampled, len(generated.token_ids)) == (51, 58)
    assert sum(span.num_tokens for span in generated.spans) == len(generated.inference_logprobs)
    assert rollout.finished_s == pytest.approx(sum(turns_s()) + 5.0, rel=0.01)


RECORDED = [
    {"num_sampled": 20, "num_observed": 7, "waited_s": 5.0},
    {"num_sampled": 21, "num_observed": None, "waited_s": 0.0},
]


def test_a_recorded_step_is_replayed_with_its_waits():
    ids = [[*LONG[:20], *range(7), *LONG[20:]]]
    plain = trace_of((1, "a", [LONG]))
    columns = {"response_tokens": [41], "turns": [RECORDED]}
    talking = trace_of((1, "a", ids), **columns)
    cluster = ClusterLayout(num_engines=1)
    alone, found = (simulate_step(trace, cluster, LATENCY).step for trace in (plain, talking))
    assert found.num_tokens == alone.num_tokens == 41
    assert found.step_s - alone.step_s == pytest.approx(5.0, rel=0.01)
    (known,) = TraceLengths(talking).before(2, ["a"]).values()
    assert known == LengthHistory(41.0, 41, mean_wait_s=5.0, observed_per_token=7 / 41)


def test_drafts_of_a_later_turn_follow_its_observation():
    """A conversation is repeated. Both turns begin with the same tokens and go on differently, so
    only what was observed tells from the first draft on what comes. Each turn takes 4 passes: 19
    tokens with drafts of 2, 4, 6 and 3, and 20 with drafts of 2, 4, 6 and 4."""
    conversation = [*LONG[:20], *range(7), *LONG[:3], *range(200, 218)]
    columns = {"response_tokens": [41, 41], "turns": [RECORDED, RECORDED]}
    trace = trace_of((1, "a", [conversation]), (2, "a", [conversation]), **columns)
    assert replayed(trace, 2, UNGATED["paper"]) == [Passes(8, 39, 8, 31)]


def test_a_store_with_conversations_becomes_a_trace(tmp_path):
    with Store(tmp_path / "refrain.duckdb") as store:
        add_rollouts(store, talk((Turn(3, 2, 1.5, num_calls=1, ended_s=9.0), Turn(2))))
    trace = from_store(tmp_path / "refrain.duckdb", token_ids=True)
    (row,) = trace.table.to_pylist()
    assert (row["response_tokens"], len(row["response_token_ids"])) == (5, 7)
    assert row["turns"] == [
        {"num_sampled": 3, "num_observed": 2, "waited_s": 1.5},
        {"num_sampled": 2, "num_observed": None, "waited_s": 0.0},
    ]
