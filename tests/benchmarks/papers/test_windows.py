"""How much of the drafts from history engines verify, by batch size."""

from dataclasses import dataclass

import pytest

from refrain.benchmarks.papers.windows import GatedHistory
from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.engine import VirtualEngine
from refrain.engines.simulate.member import Passes
from refrain.schemas.rollout import DraftSetting, RequestId, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights
from tests.simulate.latencies import LinearLatency


@dataclass(frozen=True)
class Dear(LinearLatency):
    """A decoding step takes 1 s, and 0.3 s more for each draft token of the batch."""

    def decode_s(self, tp_degree, batch, context_tokens):
        return 1.0 + 0.0 * (tp_degree + batch + context_tokens)

    def verify_s(self, tp_degree, batch, context_tokens, window):
        return self.decode_s(tp_degree, batch, context_tokens) + 0.3 * batch * window


DEAR = Dear(1.0, prefill_step_s=1.0)
DRAFTED = Passes(1, 3.0, 1, 4)
"""A pass verifies 4 drafts and yields 3 tokens."""
GATE = GatedHistory(DEAR, 1, (DRAFTED,))


def test_drafting_is_off_where_it_does_not_pay():
    assert GATE(1, 100.0) == DraftSetting("histospec", 1)
    assert GATE(2, 100.0) is None
    assert GatedHistory(DEAR, 1, (Passes(1, 1.0, 1, 4),))(1, 100.0) is None


FAR, NEAR = Passes(1, 8.0, 1, 10), Passes(1, 2.0, 1, 1)
LEVELS = GatedHistory(DEAR, 1, (FAR, NEAR))


def test_the_larger_the_batch_the_less_is_verified_until_nothing_pays():
    """A step takes 1 s, and 0.3 s more a draft token. For one request, 4 s for 8 tokens are best;
    for two, 1.6 s for 2 tokens each; for four, 1 s for one token each."""
    assert LEVELS(1, 100.0) == DraftSetting("histospec", 1)
    assert LEVELS(2, 100.0) == DraftSetting("histospec", 2)
    assert LEVELS(4, 100.0) is None
    assert [LEVELS.token_s(batch, 100.0) for batch in (1, 2, 4)] == pytest.approx(
        [0.5, 0.8, 1.0], rel=0.01
    )


def test_an_engine_verifies_as_its_batch_is():
    ids = {name: RequestId(Split.TRAIN, 1, name, 0) for name in "ab"}
    lengths = {ids["a"]: 21, ids["b"]: 101}
    replays = dict.fromkeys(lengths, LEVELS.by_window)
    engine = VirtualEngine(0, 1, DEAR, lengths, replays=replays, choose_drafting=LEVELS)

    async def run():
        await engine.load_weights(PolicyWeights(0, b"", ()))
        await engine.submit([RolloutRequest(id, (1,), 0, 999) for id in lengths])
        found = []
        while len(found) < 2:
            found += (await engine.next_events()).finished
        return {rollout.request.id.prompt_key: rollout for rollout in found}

    done = run_virtual(run())
    # One prefill, 10 passes of both requests, then 10 passes of one.
    assert done["a"].finished_s == pytest.approx(1 + 10 * 1.6, rel=0.01)
    assert done["b"].finished_s == pytest.approx(1 + 10 * 1.6 + 10 * 4.0, rel=0.01)
    assert done["b"].generated.num_draft_tokens == 10 + 100
