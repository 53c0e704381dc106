"""A policy version on its way from the trainer to the rollout engines."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Canary:
    """A sequence with the trainer's log-probabilities under one policy version."""

    token_ids: tuple[int, ...]
    """A prompt with one of its responses; at least two tokens."""
    trainer_logprobs: tuple[float, ...]
    """Log-probabilities of tokens 1.. given all before them, at temperature 1, computed in float32;
    [len(token_ids) - 1]."""
    rounded_logprobs: tuple[float, ...]
    """The same, computed by the trainer in the engines' data type."""


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A safetensors file in the shared memory of one node, with the Hugging Face parameter
    names."""

    path: Path
    num_bytes: int
    num_kept: int
    """Policy versions that are kept on a node, the newest one included."""
    node_id: str | None = None
    """Ray's name of the node; None: this machine, whoever asks."""


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """One policy version in host memory."""

    policy_version: int
    source: WeightsFile | bytes | None
    """Content of a safetensors file, or where it is; None for an engine that takes none."""
    canaries: tuple[Canary, ...]
    """Every engine must reproduce these before it may generate."""
    not_handed: tuple[str, ...] = ()
    """Engines that were to take them on the trainer's GPUs and did not, and why, one a sentence."""
    arrived: float | None = None
    """Share of the adapters' update that rounding has left; None without adapters, or before they
    have learnt anything."""
    warnings: tuple[str, ...] = ()
    """Sentences for people."""
    long_canaries: tuple[Canary, ...] = ()
    """Further canaries, of which one is long; none at most syncs (`engines.learn.canaries`)."""
