"""A policy version on its way from the trainer to the rollout engines."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Canary:
    """A sequence with the trainer's log-probabilities under one policy version."""

    token_ids: tuple[int, ...]
    """A prompt and one of its responses; at least two tokens."""
    trainer_logprobs: tuple[float, ...]
    """Log-probabilities of tokens 1.. given all earlier tokens, at temperature 1, computed in
    float32; [len(token_ids) - 1]."""
    rounded_logprobs: tuple[float, ...]
    """The same, but computed in the engines' data type."""


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A safetensors file in one node's shared memory, with Hugging Face parameter names."""

    path: Path
    num_bytes: int
    num_kept: int
    """Policy versions that a node keeps, including the newest."""
    node_id: str | None = None
    """Ray's id of the node. None: the machine of the process that reads this."""


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """One policy version in host memory."""

    policy_version: int
    source: WeightsFile | bytes | None
    """A safetensors file, or its content. None for an engine that needs no weights."""
    canaries: tuple[Canary, ...]
    """Every engine must reproduce these before it may generate."""
    not_handed: tuple[str, ...] = ()
    """Engines that should have taken the weights on the trainer's GPUs and did not: one sentence
    each, with the reason."""
    arrived: float | None = None
    """Share of the adapters' update that is left after rounding. None without adapters, or before
    they have learnt anything."""
    warnings: tuple[str, ...] = ()
    """Sentences for people."""
    long_canaries: tuple[Canary, ...] = ()
    """Further canaries, one of them long. Empty at most syncs (`engines.learn.canaries`)."""
    draft_head: Path | None = None
    """Directory of the draft head that was trained along, which all nodes see. None: there is
    none."""
