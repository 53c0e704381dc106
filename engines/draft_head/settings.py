"""The sizes of a draft head, in `head.json`. Needs no torch, so a run can check them first."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, ValidationError

from schemas.base import Frozen

SETTINGS, WEIGHTS = "head.json", "head.safetensors"


class HeadSettings(Frozen):
    """Sizes of a draft head and of the policy that it was made for."""

    version: Literal[1] = 1
    """Version of the head's definition (`model.DraftHead`)."""
    hidden_size: PositiveInt
    inner_size: PositiveInt
    vocab_size: PositiveInt
    """Size of the policy's vocabulary."""
    window: int = Field(ge=1, le=64)
    """Tokens that it was trained to draft one after the other."""


def read_settings(directory: Path, hidden_size: int, vocab_size: int) -> HeadSettings:
    """Return the settings of the head in a directory.

    `hidden_size`, `vocab_size`: those of the policy. Raise ValueError if no head is there, or one
    of another version of refrain or for another policy.
    """
    file = directory / SETTINGS
    missing = [name for name in (SETTINGS, WEIGHTS) if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"{directory} has no {' and no '.join(missing)}: name the directory of a draft head, "
            "which `refrain drafter train` makes"
        )
    try:
        settings = HeadSettings.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ValueError(
            f"{file} is damaged or of another version of refrain: make the head again with "
            f"`refrain drafter train` ({error.errors()[0]['msg']})"
        ) from error
    given = (settings.hidden_size, settings.vocab_size)
    if given != (hidden_size, vocab_size):
        raise ValueError(
            f"{file} is for a model of hidden size {given[0]} and {given[1]} token ids, but this "
            f"model has {hidden_size} and {vocab_size}: make a head for this model with "
            "`refrain drafter train`"
        )
    return settings
