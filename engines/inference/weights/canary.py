"""Check that an engine computes what the trainer computes.

The trainer scores a few sequences, the canaries, in float32 and once more in the engine's data
type. These two differ by rounding, measured on this very model. An engine that holds the same
weights differs from the trainer's float32 by about as much, and in both directions alike. So

    mean |engine - float32|    <=  floor + 1.25 mean |rounding| + 4 deviations
    |mean (engine - float32)|  <=  floor + 0.25 mean |rounding| + 4 deviations

must hold for each canary and for all of them together. Of a long canary it must hold for each
piece: a window or a rope that differs changes nothing before it. SmolLM2-135M in bfloat16, 32
sequences of 127 tokens: the engine's mean difference is 0.85 to 1.10 times the trainer's rounding.
With q and k swapped in one of 30 layers it is 13 times as large.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.inference.engine.process import generate
from schemas.weights import Canary, PolicyWeights

FLOAT32_TOLERANCE = 1e-3
"""Bound in float32, in nats: only the order of additions differs."""
LARGEST_STEP = 2.0**-4
"""Distance of neighbouring logits between 8 and 16 in bfloat16."""
ODD_TOKENS = 6.0
"""Tokens of a sequence, at most, that are wrong by one such step more than the others."""
OTHER_KERNELS = 1.25
"""Times the trainer's rounding that an engine's may be: it rounds in other places."""
ONE_SIDED = 0.25
"""Share of the rounding that may have a sign. Measured: 0.15 for transformers, 0.02 for vLLM."""
DEVIATIONS = 4.0
"""Standard deviations of a mean over the canary's tokens."""
FEW_TOKENS = 8.0
"""Tokens from which the rounding is known to a factor of two; of n tokens, to 1 + 8 / n."""
PIECE = 256
"""Tokens of a long canary that are checked together."""
MAX_ROUNDING = 0.3
"""Largest mean rounding, in nats, that leaves something to check. SmolLM2-135M has 0.04, a random
Qwen3-1.7B about 0.1."""


@dataclass(frozen=True, slots=True)
class CanaryCheck:
    """An engine's difference from the trainer over some tokens, in nats a token, and its bounds."""

    num_tokens: int
    error: float
    """Mean |engine - trainer|."""
    shift: float
    """Mean of engine - trainer, with its sign."""
    rounding: float
    """Mean of |trainer in the engine's data type - trainer in float32| over all canaries."""
    max_error: float
    max_shift: float
    start: int = 0
    """Tokens of a long canary before these."""

    @property
    def holds(self) -> bool:
        # Written so that NaN fails too.
        return (
            self.error <= self.max_error
            and abs(self.shift) <= self.max_shift
            and self.rounding <= MAX_ROUNDING
        )

    def __str__(self) -> str:
        if not self.rounding <= MAX_ROUNDING:
            return (
                f"the trainer itself differs by {self.rounding:.3g} nats a token between float32 "
                f"and model.dtype, more than {MAX_ROUNDING:g}: too coarse to check an engine by"
            )
        behind = f" behind the first {self.start:,}" if self.start else ""
        return (
            f"over {self.num_tokens} tokens{behind} its log-probabilities differ by "
            f"{self.error:.3g} nats in the mean (at most {self.max_error:.3g}) and by "
            f"{self.shift:+.3g} with their sign (at most {self.max_shift:.3g}); rounding to "
            f"model.dtype makes the trainer itself differ by {self.rounding:.3g}"
        )


def check_canaries(
    canaries: Sequence[Canary],
    engine_logprobs: Sequence[Sequence[float]],
    dtype: str,
    tolerance: float | None = None,
) -> list[CanaryCheck]:
    """Check each canary, and all of them together when there are several.

    `engine_logprobs`: of each canary's tokens 1.., as `Canary.trainer_logprobs`. `dtype`: the
    engine's. `tolerance`: replaces both bounds, in nats a token.
    """
    exact = [np.asarray(canary.trainer_logprobs) for canary in canaries]
    pairs = zip(canaries, exact, strict=True)
    rounding = [np.asarray(canary.rounded_logprobs) - own for canary, own in pairs]
    differences = [
        np.asarray(logprobs) - own for logprobs, own in zip(engine_logprobs, exact, strict=True)
    ]
    if not differences:
        return []
    spread = np.concatenate(rounding)
    several = [np.concatenate(differences)] if len(differences) > 1 else []
    return [_checked(some, spread, dtype, tolerance) for some in [*differences, *several]]


def check_pieces(
    canaries: Sequence[Canary],
    engine_logprobs: Sequence[Sequence[float]],
    dtype: str,
    tolerance: float | None = None,
) -> list[CanaryCheck]:
    """Check each piece of long canaries, by its own rounding or by that of its whole canary where
    that is larger; otherwise as `check_canaries`."""
    checks: list[CanaryCheck] = []
    for canary, logprobs in zip(canaries, engine_logprobs, strict=True):
        exact = np.asarray(canary.trainer_logprobs)
        differences = np.asarray(logprobs) - exact
        rounding = np.asarray(canary.rounded_logprobs) - exact
        # The last piece has what is left over, too.
        starts = range(0, max(1, len(exact) - PIECE + 1), PIECE)
        for start in starts:
            part = slice(start, None if start == starts[-1] else start + PIECE)
            own = _checked(differences[part], rounding[part], dtype, tolerance)
            whole = _checked(differences[part], rounding, dtype, tolerance)
            max_error = max(own.max_error, whole.max_error)
            max_shift = max(own.max_shift, whole.max_shift)
            checks.append(replace(whole, start=start, max_error=max_error, max_shift=max_shift))
    return checks


def _checked(
    differences: NDArray[np.float64],
    rounding: NDArray[np.float64],
    dtype: str,
    tolerance: float | None,
) -> CanaryCheck:
    num_tokens = len(differences)
    size = np.abs(rounding)
    root = num_tokens**0.5
    floor = (
        FLOAT32_TOLERANCE if dtype == "float32" else LARGEST_STEP * (root + ODD_TOKENS) / num_tokens
    )
    known = 1.0 + FEW_TOKENS / len(rounding)
    rms = np.sqrt(np.mean(rounding**2))
    max_error = floor + known * (OTHER_KERNELS * size.mean() + DEVIATIONS * size.std() / root)
    max_shift = floor + known * (ONE_SIDED * size.mean() + DEVIATIONS * rms / root)
    return CanaryCheck(
        num_tokens=num_tokens,
        error=float(np.abs(differences).mean()),
        shift=float(differences.mean()),
        rounding=float(size.mean()),
        max_error=tolerance or float(max_error),
        max_shift=tolerance or float(max_shift),
    )


async def compare(
    llm: Any, weights: PolicyWeights, dtype: str, tolerance: float | None
) -> list[CanaryCheck]:
    """Check all canaries of these weights on the engine that has them; `llm`: `AsyncLLM`."""
    short, long = weights.canaries, weights.long_canaries
    logprobs = await engine_logprobs(llm, (*short, *long))
    checks = check_canaries(short, logprobs[: len(short)], dtype, tolerance)
    return checks + check_pieces(long, logprobs[len(short) :], dtype, tolerance)


async def engine_logprobs(llm: Any, canaries: Sequence[Canary]) -> list[list[float]]:
    """Compute the engine's log-probabilities of each canary's tokens 1..; `llm`: `AsyncLLM`."""
    return await asyncio.gather(
        *(_logprobs(llm, f"canary-{i}", canary) for i, canary in enumerate(canaries))
    )


async def _logprobs(llm: Any, name: str, canary: Canary) -> list[float]:
    params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "flat_logprobs": True}
    final = await generate(llm, name, canary.token_ids, **params)
    pairs = zip(final.prompt_logprobs[1:], canary.token_ids[1:], strict=True)
    return [at[token].logprob for at, token in pairs]
