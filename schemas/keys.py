"""Names that must be the same in every process and after every restart: pure hashes."""

import hashlib
import struct
from collections.abc import Sequence


def prompt_key(token_ids: Sequence[int]) -> str:
    """128-bit hash of a prompt's token ids, as 32 hexadecimal digits."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def variant_key(prompt: str, content: str) -> str:
    """Key of a further row of one prompt, by what tells it apart from the first, which has the
    prompt's own key."""
    return hashlib.blake2b(f"{prompt}/{content}".encode(), digest_size=16).hexdigest()


def sample_key(seed: int, step: int, split: str, prompt: str, sample_index: int) -> int:
    """Key of one sample's noise, a signed 64-bit integer.

    It contains the step, or the same prompt would explore the same way in every epoch.
    """
    text = f"{seed}/{step}/{split}/{prompt}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def stage_name(split: str, step: int) -> str:
    """Name of a generation stage's files, in the run's directory and in MLflow."""
    return f"{split}-{step:05d}"
