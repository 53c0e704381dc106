"""A policy version on its way from the trainer to the rollout engines."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Canary:
    """A sequence with the trainer's log-probabilities under one policy version."""

    token_ids: tuple[int, ...]
    """A prompt with one of its responses; at least two tokens."""
    trainer_logprobs: tuple[float, ...]
    """Log-probabilities of tokens 1.. given all before them, at temperature 1; [len(token_ids) -
    1]."""


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """One policy version in host memory."""

    policy_version: int
    buffer: Any
    """Bytes of a safetensors file with the Hugging Face parameter names, or a Ray object
    reference to them."""
    canaries: tuple[Canary, ...]
    """Every engine must reproduce these before it may generate."""
