"""What an engine's caller hears of finished rollouts: all but their tokens."""

import pickle
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engines.inference.engine.running import Running
from engines.inference.engine.vllm_engine import VLLMEngine
from schemas.rollout import FinishReason, Rollout, VersionSpan
from tests.inference.real import CONFIG, requests

NUM_TOKENS = 16_384


def output_of(token_ids):
    """vLLM's `CompletionOutput`, as far as it is read."""
    logprobs = SimpleNamespace(logprobs=[-0.5] * len(token_ids))
    return SimpleNamespace(token_ids=token_ids, logprobs=logprobs, spec_decode_metrics=None)


def finished(request, token_ids) -> Rollout:
    generated = Running(request, 3, 1.0).generated_with(output_of(token_ids))
    return Rollout(request, generated, FinishReason.STOP, 0, 1.0, 2.0)


@pytest.fixture
def engine() -> VLLMEngine:
    """One that has finished two rollouts."""
    engine = VLLMEngine(0, CONFIG.engine)
    engine._llm = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
    first, second = requests([(5, 6, 7)])[:2]
    engine._finished = [finished(first, range(NUM_TOKENS)), finished(second, [8, 9])]
    return engine


async def test_events_hold_no_tokens(engine):
    events, rows = await engine.next_events(0)
    assert [rollout.num_tokens for rollout in events.finished] == [NUM_TOKENS, 2]
    assert len(pickle.dumps(events)) < 1000
    assert rows["response_tokens"].to_pylist() == [NUM_TOKENS, 2]
    assert rows["response_token_ids"][1].as_py() == [8, 9]
    assert rows["prompt_token_ids"].to_pylist() == [[5, 6, 7]] * 2
    assert events.finished[0].token_digest != events.finished[1].token_digest


async def test_what_was_not_received_is_told_again(engine):
    events, rows = await engine.next_events(0)
    again, same_rows = await engine.next_events(0)
    assert (again.finished, same_rows) == (events.finished, rows)
    rest, row = await engine.next_events(1)
    assert [rollout.id for rollout in rest.finished] == [events.finished[1].id]
    assert row["response_token_ids"].to_pylist() == [[8, 9]]
    assert rest.finished[0].row == 0
    assert await engine.next_events(2) == (replace(again, finished=()), None)


def test_a_request_that_comes_with_tokens_goes_on_behind_them():
    request = requests([(5, 6, 7)])[0]
    moved = Running(request, 3, 1.0).continued_by(finished(request, [8, 9]).generated)
    whole = finished(moved, [10]).generated
    assert (whole.token_ids, whole.inference_logprobs) == (
        array("i", [8, 9, 10]),
        array("f", [-0.5] * 3),
    )
    assert whole.spans == (VersionSpan(3, 3),)
    assert len(pickle.dumps(finished(request, range(NUM_TOKENS)))) < 9 * NUM_TOKENS
