"""Stop strings on real engines: a response ends with the same token on any engine, with or without
drafts."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from refrain.engines.data.dataset import load_tokenizer
from refrain.schemas.rollout import FinishReason, Generated, Rollout, RolloutRequest, VersionSpan
from tests.inference.real import CONFIG, requests, roll_out, tokens_of, weights_of
from tests.inference.test_engine import drafts_of, history_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]

STOP = ("c=", "9\n##")


@asynccontextmanager
async def stopping_at(engines, strings: Sequence[str]) -> AsyncIterator[None]:
    """Set these stop strings on the engines inside the context."""

    async def set_stop(strings: Sequence[str]) -> None:
        def change(engine) -> None:
            rollout = engine._config.rollout.model_copy(update={"stop": tuple(strings)})
            engine._config = engine._config.model_copy(update={"rollout": rollout})

        for engine in engines:
            await engine._actor.handle.__ray_call__.remote(change)

    await set_stop(strings)
    yield
    await set_stop(())


def until_stop(rollout: Rollout, strings: Sequence[str], decode: Callable) -> int:
    """Return the number of tokens up to the first that completes one of the strings.

    Return the length of the response if none does.
    """
    tokens = rollout.generated.token_ids
    ends = range(1, rollout.num_tokens + 1)
    ended = (n for n in ends if any(string in decode(tokens[:n]) for string in strings))
    return next(ended, rollout.num_tokens)


def begun(rollout: Rollout, num_tokens: int) -> RolloutRequest:
    """Return the request with its first `num_tokens` tokens, as if from another engine."""
    whole = rollout.generated
    spans = (VersionSpan(whole.spans[0].policy_version, num_tokens),) if num_tokens else ()
    generated = Generated(
        whole.token_ids[:num_tokens], whole.inference_logprobs[:num_tokens], spans
    )
    return replace(rollout.request, generated=generated if num_tokens else None)


@pytest.mark.usefixtures("ungated")
async def test_responses_end_with_the_token_that_completes_a_stop_string(
    engines, learner, prompts, on_one_engine, history
):
    """This holds without drafts, and with drafts that continue after the stop string.

    It also holds if another engine generated all tokens but the last one.
    """
    await history_of(engines[0], learner, prompts, history)
    decode = load_tokenizer(CONFIG.model.path).decode
    lengths = {id: until_stop(r, STOP, decode) for id, r in on_one_engine.items()}
    cut = {id for id, r in on_one_engine.items() if lengths[id] < r.num_tokens}
    assert len(on_one_engine) / 3 < len(cut) < len(on_one_engine)
    weights = weights_of(learner, prompts)
    anew = [(index, [(index, request) for request in requests(prompts)]) for index in (0, 1)]
    moved = [(1, begun(rollout, lengths[id] - 1)) for id, rollout in on_one_engine.items()]
    async with stopping_at(engines, STOP):
        for num_drafting, todo in [*anew, (0, moved)]:
            finished, _ = await roll_out(engines, weights, todo)
            assert (drafts_of(finished)[2] > 50) == bool(num_drafting)
            for id, rollout in finished.items():
                whole = on_one_engine[id]
                own, expected, num = rollout.generated, whole.generated, lengths[id]
                assert own.token_ids == expected.token_ids[:num]
                logprobs = expected.inference_logprobs[:num]
                assert own.inference_logprobs == pytest.approx(logprobs, abs=1e-4)
                reason = FinishReason.STOP if id in cut else whole.finish_reason
                assert rollout.finish_reason is reason
    finished, _ = await roll_out(engines, weights, anew[1][1])
    assert tokens_of(finished) == tokens_of(on_one_engine), "stop strings are still set"
