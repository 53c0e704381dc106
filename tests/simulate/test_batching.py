"""A batch that jumps over steps agrees with one that goes token by token."""

import pytest

from refrain.engines.simulate.batching import SimulatedRequest, VirtualBatch
from refrain.schemas.rollout import RequestId, RolloutRequest, Split
from tests.simulate.latencies import LinearLatency

LATENCY = LinearLatency(0.01, 1e-4, 1e-6, prefill_token_s=1e-5)


def member(name, length, prompt_tokens=10):
    id = RequestId(Split.TRAIN, 1, str(name), 0)
    return SimulatedRequest(RolloutRequest(id, (0,) * prompt_tokens, 0, length + 1), length, 0, 0.0)


def batch_of(max_num_seqs=4, max_context_tokens=None):
    return VirtualBatch(1, LATENCY, max_num_seqs, max_context_tokens)


def finish(batch):
    batch.advance(1e9)
    return {m.request.id.prompt_key: m.finished_s for m in batch.finished}


def test_leaving_request_keeps_its_tokens():
    batch = batch_of()
    batch.add([member("stays", 100), member("leaves", 100)], 0.0)
    id = RequestId(Split.TRAIN, 1, "leaves", 0)
    removed, free_s = batch.remove([id], 0.5)
    assert 0.5 <= free_s <= 0.5 + 0.011
    prefill_s = LATENCY.prefill_s(1, 2, 10)
    steps = [LATENCY.decode_s(1, 2, 22 + 2 * i) for i in range(removed[0].done - 1)]
    assert prefill_s + sum(steps) == pytest.approx(free_s)
    assert removed[0].joined is None
    assert finish(batch).keys() == {"stays"}


def test_request_leaving_during_prefill_has_no_tokens():
    batch = batch_of()
    batch.add([member(i, 10) for i in range(6)], 0.0)
    ids = [RequestId(Split.TRAIN, 1, str(i), 0) for i in (0, 5)]
    removed, free_s = batch.remove(ids, 1e-3)
    assert [m.done for m in removed] == [0, 0]
    assert free_s == 1e-3
    assert finish(batch).keys() == {"1", "2", "3", "4"}


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(ValueError, match="needs 310 tokens of KV cache, but an engine has 200"):
        batch_of(4, 200).add([member(0, 300)], 0.0)
