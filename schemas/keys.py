"""Hashes that name things: the same in every process and after every restart. Pure."""

import hashlib
import struct
from collections.abc import Sequence


def prompt_key(token_ids: Sequence[int]) -> str:
    """Return the 128-bit hash of a prompt's token ids, as 32 hexadecimal digits."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def variant_key(prompt: str, content: str) -> str:
    """Return the key of a further row with the same prompt. `content`: what differs from the first
    row, which has the prompt's own key."""
    return hashlib.blake2b(f"{prompt}/{content}".encode(), digest_size=16).hexdigest()


def sample_key(seed: int, step: int, split: str, prompt: str, sample_index: int) -> int:
    """Return the key of one sample's noise, a signed 64-bit integer.

    It depends on the step, as otherwise the same prompt would explore the same way in every epoch.
    """
    text = f"{seed}/{step}/{split}/{prompt}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def group_seed(seed: int, step: int, split: str, prompt: str) -> int:
    """Return the seed of the environments of all samples of a prompt in a step, at least 0."""
    text = f"{seed}/{step}/{split}/{prompt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def stage_name(split: str, step: int) -> str:
    """Return the name of a generation stage's files, in the run's directory and in MLflow."""
    return f"{split}-{step:05d}"
