"""Drafting from history: virtual engines do what the replay predicts."""

import asyncio
from dataclasses import dataclass

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.histospec.gate import ProfiledStepTimes
from refrain.engines.simulate.batching import VirtualBatch
from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.cluster import PolicySet, simulate_step
from refrain.engines.simulate.engine import VirtualEngine
from refrain.engines.simulate.history import DRAFTINGS, PAPER, replay_step
from refrain.engines.simulate.member import PARTS, Passes, SimulatedRequest
from refrain.engines.simulate.trace import Trace
from refrain.schemas.rollout import DraftSetting, RequestId, RolloutRequest, Split
from refrain.schemas.simulate import ClusterLayout
from refrain.schemas.weights import PolicyWeights
from tests.simulate.comparing import compare
from tests.simulate.latencies import LinearLatency
from tests.simulate.test_drafting import id_of

UNGATED = {
    name: config.model_copy(update={"gate": False, "max_draft": 32})
    for name, config in DRAFTINGS.items()
}
"""Without the gate, every draft token is verified."""
HISTOSPEC = DraftSetting("histospec", 1)
LONG = list(range(100, 141))
"""A first token and 40 more."""
OTHER = [LONG[0], *range(200, 240)]
LINEAR = LinearLatency(1.0, prefill_step_s=1.0)


def trace_of(*groups, **columns) -> Trace:
    """Return a trace of (step, prompt, responses) groups. A prompt's name is its last token."""
    rows = [
        (step, key, i, response)
        for step, key, responses in groups
        for i, response in enumerate(responses)
    ]
    table = {
        "step": [row[0] for row in rows],
        "epoch": [row[0] for row in rows],
        "prompt_key": [row[1] for row in rows],
        "sample_index": [row[2] for row in rows],
        "prompt_tokens": [3] * len(rows),
        "response_tokens": [len(row[3]) for row in rows],
        "reward": [1.0] * len(rows),
        "prompt_token_ids": [[1, 2, ord(row[1])] for row in rows],
        "response_token_ids": [row[3] for row in rows],
    }
    return Trace(pa.table(table | columns), "t")


def replay_of(trace: Trace, step: int, config, latency=LINEAR, num_parts=1):
    times = ProfiledStepTimes(latency, 1)
    return replay_step(trace.step(step), trace.before(step), config, times, num_parts)


def replayed(trace: Trace, step: int, config=UNGATED["paper"]) -> list[Passes]:
    """Return the passes of each response, in row order."""
    return list(replay_of(trace, step, config).values())


@pytest.mark.parametrize(
    ("window", "passes"),
    [
        # 2, 4, 6, 8, 10 and the 4 before the last token; each pass adds a token of its own.
        ("paper", Passes(6, 40, 6, 34)),
        # 2, 4, 8, 16 and 5.
        ("doubling", Passes(5, 40, 5, 35)),
    ],
)
def test_the_same_response_again_takes_as_many_passes_as_the_windows_say(window, passes):
    trace = trace_of((1, "a", [LONG]), (2, "a", [LONG]))
    assert replayed(trace, 2, UNGATED[window]) == [passes]
    first, again = compare(
        trace, ClusterLayout(num_engines=1), LINEAR, [PolicySet("p", histospec=UNGATED[window])]
    )
    assert first.step_s == 41.0
    drafting_s = 0.011 * passes.num_draft_tokens
    assert again.step_s == pytest.approx(1.0 + passes.num_passes + drafting_s, rel=1e-9)
    assert first.num_tokens == again.num_tokens == 41


def test_without_history_nothing_is_drafted():
    trace = trace_of((1, "a", [LONG, LONG[:7]]), (2, "b", [LONG]), (3, "a", [LONG]))
    assert replayed(trace, 1) == replayed(trace, 2) == []
    layout = ClusterLayout(num_engines=2)
    plain, drafting = (
        compare(trace, layout, LINEAR, [PolicySet("p", histospec=config)])
        for config in (None, UNGATED["paper"])
    )
    assert drafting[:2] == plain[:2]
    assert drafting[2].step_s < plain[2].step_s


def test_a_response_of_one_token_has_no_decode_steps():
    assert replayed(trace_of((1, "a", [LONG]), (2, "a", [LONG[:1], LONG])), 2) == [
        Passes(6, 40, 6, 34)
    ]


@pytest.mark.parametrize(
    ("rewards", "num_passes"),
    [((1.0, None), [6, 7]), ((None, 0.5), [7, 6]), ((-1.0, None), [7, 6])],
)
def test_rewarded_responses_are_drafted(rewards, num_passes):
    """Both responses begin with the same token. A missing reward counts as 0. The wrong guess costs
    a pass. From the next token on, the match is unique."""
    trace = trace_of((1, "a", [LONG, OTHER]), (2, "a", [LONG, OTHER]), reward=[*rewards, 0.0, 0.0])
    assert [passes.num_passes for passes in replayed(trace, 2)] == num_passes


def test_only_the_last_earlier_group_is_drafted_from():
    step = (3, "a", [LONG, OTHER])
    trace = trace_of((1, "a", [LONG]), (2, "a", [OTHER]), step, (4, "a", [LONG]))
    assert trace.before(3).column("step").tolist() == [2]
    of_old, of_new = replayed(trace, 3)
    # The first token matches the history. No later token does.
    assert of_old == Passes(40, 40, 1, 2)
    assert of_new == Passes(6, 40, 6, 34)


@dataclass(frozen=True)
class Stepwise(LinearLatency):
    """Each step takes a second, whatever it does."""

    def verify_s(self, tp_degree, batch, context_tokens, window):
        return self.decode_s(tp_degree, batch, context_tokens) + 0.0 * window

    def draft_s(self, drafter, batch, window):
        assert drafter == "histospec"
        return 0.0 * batch * window


STEPWISE = Stepwise(1.0, prefill_step_s=1.0)


def member(name, passes: Passes, prompt_tokens=3) -> SimulatedRequest:
    length = int(1 + passes.num_tokens)
    request = RolloutRequest(id_of(name), (0,) * prompt_tokens, 0, length + 1)
    return SimulatedRequest(request, length, 0, 0.0, replayed=passes)


def rolled_out(members, latency=STEPWISE, **limits):
    batch = VirtualBatch(
        1, latency, limits.get("max_num_seqs", 256), limits.get("max_context_tokens")
    )
    batch.set_drafting(HISTOSPEC, 0.0)
    batch.add(members, 0.0)
    batch.advance(1e9)
    assert len(batch.finished) == len(members)
    return batch


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(deadline=None)
@given(
    st.lists(TOKENS, min_size=1, max_size=3),
    st.lists(TOKENS, min_size=1, max_size=4),
    st.sampled_from([*DRAFTINGS.values(), *UNGATED.values()]),
)
def test_every_response_ends_after_its_replayed_passes(past, responses, config):
    trace = trace_of((1, "a", past), (2, "a", responses))
    known = replay_of(trace, 2, config)
    lengths = [len(response) for response in responses if len(response) > 1]
    assert [1 + p.num_tokens for p in known.values()] == lengths
    members = [member(i, passes) for i, passes in enumerate(known.values())]
    if members:
        rolled_out(members)
    for m, passes in zip(members, known.values(), strict=True):
        assert m.finished_s == pytest.approx(1 + passes.num_passes)
        assert m.num_verifications == passes.num_verifications
        assert m.num_draft_tokens == passes.num_draft_tokens
        assert m.num_accepted_tokens == passes.num_tokens - passes.num_passes


@given(st.integers(1, 10**6), st.integers(0, 32 * 10**6))
def test_the_rate_ends_it_exactly_after_its_passes(num_passes, num_accepted):
    passes = Passes(num_passes, num_passes + min(num_accepted, 32 * num_passes))
    assert (num_passes - 1) * passes.rate < passes.num_tokens * PARTS <= num_passes * passes.rate


@dataclass(frozen=True)
class Steep(LinearLatency):
    """Decoding takes a second. Verifying and drafting add the square of the window."""

    def decode_s(self, tp_degree, batch, context_tokens):
        return 1.0 + 0.0 * (tp_degree + batch + context_tokens)

    def verify_s(self, tp_degree, batch, context_tokens, window):
        assert window >= 1
        return self.decode_s(tp_degree, batch, context_tokens) + 0.1 * window**2

    def draft_s(self, drafter, batch, window):
        return 0.01 * window**2 if drafter else 0.0 * batch


def test_a_step_costs_what_the_mean_window_of_those_in_it_costs():
    """The requests have windows of 4 and 1 on average, or of 1 and 0. The second ends alone."""
    steep = Steep(1.0, prefill_step_s=1.0)
    for first, second, both_s, alone_s in (
        (Passes(10, 20, 10, 40), Passes(30, 40, 30, 30), 1.0 + 0.11 * (2**2 + 3**2) / 2, 1.11),
        (Passes(10, 15, 5, 10), Passes(30, 30), 1.0 + 0.11 / 2, 1.0),
    ):
        a, b = rolled_out([member("a", first), member("b", second)], steep).finished
        assert a.finished_s == pytest.approx(1.0 + 10 * both_s)
        assert b.finished_s == pytest.approx(a.finished_s + 20 * alone_s)


def test_a_full_cache_costs_passes_and_keeps_the_tokens():
    known = [Passes(10 + i, 40 + 3 * i, 10, 40 + i) for i in range(9)]
    batch = rolled_out([member(i, passes) for i, passes in enumerate(known)], max_context_tokens=99)
    assert batch.num_preempted > 0
    for m in batch.finished:
        passes = known[int(m.request.id.prompt_key)]
        assert m.done == m.length == 1 + passes.num_tokens
        assert m.num_verifications <= passes.num_verifications
        assert m.num_draft_tokens <= passes.num_draft_tokens
        assert 0 <= m.num_accepted_tokens <= passes.num_tokens - passes.num_passes


def test_a_moved_request_keeps_its_remaining_passes():
    """5 of the 20 passes are done, at 4 tokens each. The prefill on the other engine yields 1 of
    the remaining 60 tokens."""
    id = RequestId(Split.TRAIN, 1, "a", 0)
    request = RolloutRequest(id, (1, 2, 3), 0, 1000)
    replays = {id: Passes(20, 80, 10, 80)}
    engines = [VirtualEngine(i, 1, STEPWISE, {id: 81}, replays=replays) for i in range(2)]

    async def run():
        for engine in engines:
            await engine.load_weights(PolicyWeights(0, b"", ()))
            await engine.set_drafting(HISTOSPEC)
        await engines[0].submit([request])
        await asyncio.sleep(5.5)
        (moved,) = await engines[0].withdraw([id])
        await engines[1].submit([moved])
        (rollout,) = (await engines[1].next_events()).finished
        return moved.generated, rollout

    before, rollout = run_virtual(run())
    assert (len(before.token_ids), before.num_verifications, before.num_draft_tokens) == (21, 2, 20)
    after = rollout.generated
    assert rollout.finished_s == pytest.approx(6.0 + 1.0 + 15.0)
    assert sum(span.num_tokens for span in after.spans) == len(after.token_ids) == 81
    assert after.num_verifications == 2 + 7
    assert after.num_draft_tokens == 20 + 60
    assert after.num_accepted_tokens == 15 + 59 - 15


@dataclass(frozen=True)
class Dear(LinearLatency):
    """Decoding takes a second, and each draft token of the batch 0.6 s more. For one request alone,
    a token pays if it is right often enough. For two together, none pays."""

    def decode_s(self, tp_degree, batch, context_tokens):
        return 1.0 + 0.0 * (tp_degree + batch + context_tokens)

    def verify_s(self, tp_degree, batch, context_tokens, window):
        return self.decode_s(tp_degree, batch, context_tokens) + 0.6 * batch * window


DEAR = Dear(1.0, prefill_step_s=1.0)
FOUR = trace_of(*((step, key, [LONG]) for step in (1, 2) for key in "abcd"))


@pytest.mark.parametrize("name", DRAFTINGS)
def test_gate_may_reject_drafts_of_larger_batches(name):
    config = DRAFTINGS[name]
    alone, together = (replay_of(FOUR, 2, config, DEAR, num_parts).values() for num_parts in (4, 1))
    assert all(passes.num_draft_tokens > 0 for passes in alone)
    assert [passes.num_draft_tokens for passes in together] == [0] * 4
    ungated = config.model_copy(update={"gate": False})
    assert all(p.num_draft_tokens > 0 for p in replay_of(FOUR, 2, ungated, DEAR).values())


def test_prompts_are_dealt_round_robin_and_those_without_history_count():
    """There are two parts: a with c, which has no history, and b alone."""
    past = [(1, key, [LONG]) for key in "ab"]
    now = [(2, key, [LONG]) for key in "abc"]
    passes = replay_of(trace_of(*past, *now), 2, DRAFTINGS["goodput"], DEAR, 2)
    drafted = {id.prompt_key: of_one.num_draft_tokens > 0 for id, of_one in passes.items()}
    assert drafted == {"a": False, "b": True}


def test_an_engine_has_its_share_of_the_batch():
    policy_sets = [PolicySet(), PolicySet("p", histospec=DRAFTINGS["goodput"])]
    for layout, pays in (
        (ClusterLayout(num_engines=1), False),
        (ClusterLayout(num_engines=4), True),
        (ClusterLayout(num_engines=1, max_num_seqs=1), True),
    ):
        plain, drafting = compare(FOUR, layout, DEAR, policy_sets, [2])
        assert (drafting.step_s < plain.step_s) == pays


@pytest.mark.parametrize("column", ["prompt_token_ids", "response_token_ids"])
@pytest.mark.parametrize("row", [0, 1])
def test_a_trace_without_token_ids_is_refused(column, row):
    """Row 0 belongs to the history, row 1 to the step."""
    ids = [[1, 2, 97], [1, 2, 97]] if column.startswith("prompt") else [LONG, LONG]
    ids[row] = None
    trace = trace_of((1, "a", [LONG]), (2, "a", [LONG]), **{column: pa.array(ids)})
    with pytest.raises(ValueError, match=r"t lacks token ids, .* `refrain export RUN FILE --token"):
        compare(trace, ClusterLayout(num_engines=1), LINEAR, [PolicySet("p", histospec=PAPER)], [2])
    assert simulate_step(trace.step(2), ClusterLayout(num_engines=1), LINEAR).step.step_s == 41.0
