"""Check that an engine computes what the trainer computes: sequences with the trainer's
log-probabilities, of which it computes its own."""

import asyncio
from collections.abc import Sequence
from typing import Any

from engines.inference.engine.process import generate
from schemas.weights import Canary


async def canary_errors(llm: Any, canaries: Sequence[Canary]) -> list[float]:
    """Mean |trainer - engine| log-probability of each; `llm`: vLLM's `AsyncLLM`."""
    return await asyncio.gather(
        *(_error(llm, f"canary-{i}", canary) for i, canary in enumerate(canaries))
    )


async def _error(llm: Any, name: str, canary: Canary) -> float:
    params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "flat_logprobs": True}
    final = await generate(llm, name, canary.token_ids, **params)
    engine_logprobs = [
        at[token].logprob
        for at, token in zip(final.prompt_logprobs[1:], canary.token_ids[1:], strict=True)
    ]
    pairs = zip(engine_logprobs, canary.trainer_logprobs, strict=True)
    return sum(abs(a - b) for a, b in pairs) / len(engine_logprobs)
