"""An engine reports finished rollouts without their tokens, and reports every failure at once."""

import asyncio
import pickle
from array import array
from dataclasses import replace
from math import nan
from types import SimpleNamespace

import numpy as np
import pytest

from refrain.engines.inference.engine.running import Running
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.inference.kv.saving import KVSaving
from refrain.engines.inference.weights import canary
from refrain.engines.rollout.interface import WeightSyncError
from refrain.engines.store.rows import from_stream
from refrain.schemas.drafting import DraftingConfig, SpecActorConfig
from refrain.schemas.rollout import FinishReason, Generated, Rollout, VersionSpan
from refrain.schemas.weights import Canary, PolicyWeights
from tests.inference.real import CONFIG, requests

NUM_TOKENS = 16_384
UNDRAFTED = CONFIG.engine.model_copy(
    update={"drafting": DraftingConfig(enabled=False), "specactor": SpecActorConfig()}
)


def output_of(token_ids, experts=None):
    """Return a fake of vLLM's `CompletionOutput`, with the fields that engines read."""
    logprobs = SimpleNamespace(logprobs=[-0.5] * len(token_ids))
    return SimpleNamespace(
        token_ids=token_ids, logprobs=logprobs, spec_decode_metrics=None, routed_experts=experts
    )


def finished(request, token_ids) -> Rollout:
    generated = Running(request, 3, 1.0).generated_with(output_of(token_ids))
    return Rollout(request, generated, FinishReason.STOP, 0, 1.0, 2.0)


@pytest.fixture
def engine() -> VLLMEngine:
    """An engine without drafts that has finished two rollouts."""
    engine = VLLMEngine(0, UNDRAFTED)
    engine._llm = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
    first, second = requests([(5, 6, 7)])[:2]
    engine._finished = [finished(first, range(NUM_TOKENS)), finished(second, [8, 9])]
    return engine


async def test_events_hold_no_tokens(engine):
    events, rows = await engine.next_events(0)
    assert [rollout.num_tokens for rollout in events.finished] == [NUM_TOKENS, 2]
    assert len(pickle.dumps(events)) < 1000
    rows = from_stream(rows)
    assert rows["response_tokens"].to_pylist() == [NUM_TOKENS, 2]
    assert rows["response_token_ids"][1].as_py() == [8, 9]
    assert rows["prompt_token_ids"].to_pylist() == [[5, 6, 7]] * 2
    assert events.finished[0].token_digest != events.finished[1].token_digest


async def test_unacknowledged_rollouts_are_reported_again(engine):
    """The engine repeats rollouts until the caller acknowledges them."""
    events, rows = await engine.next_events(0)
    again, same_rows = await engine.next_events(0)
    assert (again.finished, same_rows) == (events.finished, rows)
    rest, row = await engine.next_events(1)
    assert [rollout.id for rollout in rest.finished] == [events.finished[1].id]
    assert from_stream(row)["response_token_ids"].to_pylist() == [[8, 9]]
    assert rest.finished[0].row == 0
    assert await engine.next_events(2) == (replace(again, finished=()), None)


def test_request_with_tokens_continues_after_them():
    request = requests([(5, 6, 7)])[0]
    moved = Running(request, 3, 1.0).continued_by(finished(request, [8, 9]).generated)
    whole = finished(moved, [10]).generated
    assert (whole.token_ids, whole.inference_logprobs) == (
        array("i", [8, 9, 10]),
        array("f", [-0.5] * 3),
    )
    assert whole.spans == (VersionSpan(3, 3),)
    assert len(pickle.dumps(finished(request, range(NUM_TOKENS)))) < 9 * NUM_TOKENS


class Speaks(VLLMEngine):
    """An engine whose vLLM returns `final` as the final output, or raises it."""

    def __init__(self, final) -> None:
        super().__init__(0, UNDRAFTED)
        self._llm = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
        self._saving = KVSaving(self._llm, self.tp_degree)
        self._policy_version, self._final = 0, final

    async def _admit(self, _, requests):
        for request in requests:
            request.put(self._final)


class Silent(Speaks):
    """An engine whose vLLM has not answered yet."""

    def __init__(self) -> None:
        super().__init__(None)
        self.admitted = []

    async def _admit(self, _, requests):
        self.admitted += requests


def final_of(output, finish_reason="stop"):
    output.finish_reason = finish_reason
    return SimpleNamespace(outputs=[output], num_cached_tokens=0)


def fewer_logprobs():
    output = output_of([8, 9])
    output.logprobs.logprobs.pop()
    return output


def failed(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("final", "told"),
    [
        (final_of(fewer_logprobs()), "AssertionError"),
        (final_of(output_of([8]), "abort"), "abort"),
        (SimpleNamespace(outputs=[], num_cached_tokens=0), "ValueError"),
        (failed(KeyError(), TypeError("odd output")), "odd output"),
    ],
)
async def test_failure_after_the_final_output_is_reported_immediately(final, told):
    """Otherwise the driver would wait for the request until `rollout.stall_timeout_s`."""
    engine = Speaks(final)
    await engine.submit(requests([(5, 6, 7)])[:1])
    with pytest.raises(RuntimeError, match=rf"^vLLM failed: .*{told}"):
        await asyncio.wait_for(engine.next_events(0), 5)


async def test_a_request_that_is_here_is_not_taken_again():
    """Nor twice in one submission: two requests of one name could not end separately."""
    engine, (first, second) = Silent(), requests([(5, 6, 7)])[:2]
    await engine.submit([first])
    for again in ([first], [second, first], [second, second]):
        with pytest.raises(AssertionError, match="submitted twice"):
            await engine.submit(again)
    assert [request.name for request in engine.admitted] == [str(first.id)]


async def test_final_output_is_reported_as_finished():
    engine = Speaks(final_of(output_of([8, 9])))
    await engine.submit(requests([(5, 6, 7)])[:1])
    events, _ = await asyncio.wait_for(engine.next_events(0), 5)
    assert [rollout.num_tokens for rollout in events.finished] == [2]


@pytest.mark.parametrize("errors", [[nan], [0.0, nan], [nan, 0.0], [0.0, 1.0]])
async def test_weights_that_differ_or_give_no_number_are_refused(monkeypatch, errors):
    with pytest.raises(WeightSyncError, match="policy version 3"):
        await checked(monkeypatch, errors)


@pytest.mark.parametrize(("errors", "worst"), [([], 0.0), ([0.0, 1e-7], 1e-7)])
async def test_weights_that_agree_are_taken(monkeypatch, errors, worst):
    assert await checked(monkeypatch, errors) == pytest.approx(worst)


async def test_a_layer_that_kept_older_weights_is_refused(monkeypatch):
    with pytest.raises(
        WeightSyncError, match=r"rank 1 took no new weights for 1 layers, such as l\.1"
    ):
        await checked(monkeypatch, [0.0], stale=[[], ["l.1"]])


async def checked(monkeypatch, errors, stale=((), ())) -> float:
    """Check one canary of two tokens for each error: the engine is off by that much."""
    logprobs = [[-1.0 + error, -2.0 + error] for error in errors]
    monkeypatch.setattr(canary, "engine_logprobs", returning(logprobs))
    engine = VLLMEngine(0, CONFIG.engine)
    engine._llm = SimpleNamespace(collective_rpc=returning(stale))
    canaries = (Canary((1, 2, 3), (-1.0, -2.0), (-1.0, -2.0)),) * len(errors)
    return await engine._check_weights(PolicyWeights(3, b"", canaries))


def returning(value):
    async def answer(*_):
        return value

    return answer


def test_rejections_are_verifications_that_stopped_early():
    """Of four verifications two are rejections: 3 of 3, 1 of 2, 0 of 1 and 1 of 1 are accepted.

    The request comes with one more rejection from before.
    """
    request = replace(
        requests([(1, 2)])[0],
        generated=Generated([], [], (), 5, 1, 2, 1),
    )
    metrics = SimpleNamespace(
        histogram=[1, 2, 0, 1],
        num_draft_tokens=7,
        per_step_accepted=[3, 1, 0, 1],
        per_step_drafted=[3, 2, 1, 1],
    )
    output = output_of([])
    output.spec_decode_metrics = metrics
    found = Running(request, 3, 1.0).generated_with(output)
    assert (found.num_draft_tokens, found.num_accepted_tokens) == (12, 6)
    assert (found.num_verifications, found.num_rejections) == (6, 3)


def test_a_moved_request_keeps_the_experts_of_its_first_engine():
    """Each engine reports all positions but the last, and the second has computed the first ones
    anew."""
    request = replace(requests([(5, 6, 7)])[0], generated=None)
    experts = np.arange(1, 13, dtype=np.uint8).reshape(6, 1, 2)
    before = Running(request, 3, 1.0).generated_with(output_of([8, 9], experts[:4]))
    assert before.experts == experts[:4].tobytes()
    moved = Running(replace(request, generated=before), 3, 1.0)
    anew = experts + 100
    whole = moved.generated_with(output_of([10, 11], anew))
    assert whole.experts == experts[:4].tobytes() + anew[4:].tobytes()
    assert moved.generated_with(output_of([10, 11])).experts == before.experts
