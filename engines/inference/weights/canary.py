"""Check that an engine computes what the trainer computes.

The trainer scores a few sequences (the canaries) in float32, and again in the engine's data type.
The difference is the rounding of this very model. An engine with the same weights should differ
from the trainer's float32 by about as much, and equally in both directions. So we require

    mean |engine - float32|    <=  floor + 1.25 mean |rounding| + 4 deviations
    |mean (engine - float32)|  <=  floor + 0.25 mean |rounding| + 4 deviations

for each canary and for all canaries together. Long canaries must pass for each piece: a wrong
attention window or RoPE setting shows only after some position.

Measured on SmolLM2-135M in bfloat16 with 32 sequences of 127 tokens: the engine's mean difference
is 0.85 to 1.10 times the trainer's rounding. With q and k swapped in one of 30 layers it is 13
times the rounding.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refrain.engines.inference.engine.process import generate
from refrain.engines.rollout.interface import WeightSyncError
from refrain.schemas.weights import Canary, PolicyWeights

FLOAT32_TOLERANCE = 1e-3
"""Floor of the bounds in float32, in nats: only the order of additions differs."""
LARGEST_STEP = 2.0**-4
"""Distance of neighbouring bfloat16 numbers between 8 and 16, where large logits are."""
ODD_TOKENS = 6.0
"""Most tokens of a sequence that may be off by one such step more than the others."""
OTHER_KERNELS = 1.25
"""Factor by which an engine's rounding may exceed the trainer's: it rounds in other places."""
ONE_SIDED = 0.25
"""Share of the rounding that may be one-sided. Measured: 0.15 for transformers, 0.02 for vLLM."""
DEVIATIONS = 4.0
"""Standard deviations that a mean over the canary's tokens may be off."""
FEW_TOKENS = 8.0
"""With n tokens, the measured rounding is uncertain by a factor of 1 + 8 / n."""
PIECE = 256
"""Tokens of a long canary to check together."""
MAX_ROUNDING = 0.3
"""Largest mean rounding, in nats, at which a check still means something. SmolLM2-135M has 0.04, a
Qwen3-1.7B with random weights about 0.1."""


@dataclass(frozen=True, slots=True)
class CanaryCheck:
    """An engine's difference from the trainer over some tokens, with bounds. Nats per token."""

    num_tokens: int
    error: float
    """Mean |engine - trainer|."""
    shift: float
    """Mean of engine - trainer, signed."""
    rounding: float
    """Mean of |trainer in the engine's data type - trainer in float32| over all canaries."""
    max_error: float
    max_shift: float
    start: int = 0
    """Position of the first of these tokens in a long canary."""

    @property
    def holds(self) -> bool:
        # Comparisons with NaN are False, so NaN fails.
        return (
            self.error <= self.max_error
            and abs(self.shift) <= self.max_shift
            and self.rounding <= MAX_ROUNDING
        )

    def __str__(self) -> str:
        if not self.rounding <= MAX_ROUNDING:
            return (
                f"the trainer itself differs by {self.rounding:.3g} nats a token between float32 "
                f"and model.dtype, more than {MAX_ROUNDING:g}: too much to check an engine"
            )
        behind = f" after the first {self.start:,}" if self.start else ""
        return (
            f"over {self.num_tokens} tokens{behind} its log-probabilities have a mean absolute "
            f"difference of {self.error:.3g} nats (at most {self.max_error:.3g}) and a mean "
            f"difference of {self.shift:+.3g} (at most {self.max_shift:.3g}); rounding to "
            f"model.dtype makes the trainer itself differ by {self.rounding:.3g}"
        )


def check_canaries(
    canaries: Sequence[Canary],
    engine_logprobs: Sequence[Sequence[float]],
    dtype: str,
    tolerance: float | None = None,
) -> list[CanaryCheck]:
    """Check each canary, and all of them together if there are several.

    Args:
        canaries: sequences with the trainer's log-probabilities.
        engine_logprobs: of each canary's tokens from the second on, like
            `Canary.trainer_logprobs`.
        dtype: data type of the engine.
        tolerance: if given, replaces both bounds, in nats per token.
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
    """Check each piece of long canaries. The arguments are those of `check_canaries`.

    The bounds use the rounding of the piece or of its whole canary, whichever is larger.
    """
    checks: list[CanaryCheck] = []
    for canary, logprobs in zip(canaries, engine_logprobs, strict=True):
        exact = np.asarray(canary.trainer_logprobs)
        differences = np.asarray(logprobs) - exact
        rounding = np.asarray(canary.rounded_logprobs) - exact
        # The last piece includes the remaining tokens.
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
    """Check all canaries of these weights on an engine. `llm`: its `AsyncLLM`."""
    short, long = weights.canaries, weights.long_canaries
    logprobs = await engine_logprobs(llm, (*short, *long))
    checks = check_canaries(short, logprobs[: len(short)], dtype, tolerance)
    return checks + check_pieces(long, logprobs[len(short) :], dtype, tolerance)


async def engine_logprobs(llm: Any, canaries: Sequence[Canary]) -> list[list[float]]:
    """Return the engine's log-probabilities of each canary's tokens from the second on.

    `llm`: the engine's `AsyncLLM`.
    """
    return await asyncio.gather(
        *(_logprobs(llm, f"canary-{i}", canary) for i, canary in enumerate(canaries))
    )


async def _logprobs(llm: Any, name: str, canary: Canary) -> list[float]:
    params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "flat_logprobs": True}
    final = await generate(llm, name, canary.token_ids, **params)
    pairs = zip(final.prompt_logprobs[1:], canary.token_ids[1:], strict=True)
    return [at[token].logprob for at, token in pairs]


async def check_weights(
    llm: Any, engine: int, weights: PolicyWeights, dtype: str, tolerance: float | None
) -> float:
    """Return the largest mean |engine - trainer| log-probability of the canaries.

    Raise `WeightSyncError` if a layer kept older weights, or a canary differs too much.
    """
    version = f"engine {engine} after loading policy version {weights.policy_version}"
    for rank, layers in enumerate(await llm.collective_rpc("stale_layers")):
        if layers:
            raise WeightSyncError(
                f"{version}: rank {rank} took no new weights for {len(layers)} layers, such as "
                f"{layers[0]}: they still have an older version"
            )
    checks = await compare(llm, weights, dtype, tolerance)
    for check in checks:
        if not check.holds:
            raise WeightSyncError(f"{version} differs from the trainer: {check}")
    return max((check.error for check in checks), default=0.0)
