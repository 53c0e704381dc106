"""Check that an engine computes what the trainer computes: sequences with the trainer's
log-probabilities, of which it computes its own."""

import asyncio
from collections.abc import Sequence
from math import sqrt
from typing import Any

from engines.inference.engine.process import generate
from schemas.weights import Canary

FLOAT32_TOLERANCE = 1e-3
BFLOAT16_ERROR = 0.04
"""Most that bfloat16 is wrong by in the mean over a long sequence, in nats a token."""
BFLOAT16_SPREAD = 2.0
"""How many times that a single token may be wrong by, beyond it."""


def default_tolerance(dtype: str, num_tokens: int) -> float:
    """Bound of a sequence's mean |trainer - engine| log-probability, in nats.

    In float32 only the order of additions differs. bfloat16 has 8 bits: hidden states, and with
    them logits, are rounded in other places by engine and trainer, which differ by some hundredths
    in each token, now more, now less: the mean of n tokens spreads by 1 / sqrt(n).
    """
    if dtype == "float32":
        return FLOAT32_TOLERANCE
    return BFLOAT16_ERROR * (1.0 + BFLOAT16_SPREAD / sqrt(max(1, num_tokens)))


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
