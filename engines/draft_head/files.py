"""Save and load draft heads.

DIRECTORY/head.safetensors    the weights, float32, and the draft vocabulary, int64
DIRECTORY/head.json           the sizes (`HeadSettings`)
"""

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from refrain.engines.draft_head.model import DraftHead
from refrain.engines.durable import replacing, write_durably
from refrain.schemas.base import Frozen

SETTINGS, WEIGHTS = "head.json", "head.safetensors"
_REMEDY = "make the head again with `refrain drafter train`"


class HeadSettings(Frozen):
    """Sizes of a draft head and of the policy that it was made for."""

    version: Literal[2] = 2
    """Version of the head's definition (`model.DraftHead`)."""
    hidden_size: PositiveInt
    inner_size: PositiveInt
    vocab_size: PositiveInt
    """Size of the policy's vocabulary."""
    num_draft_tokens: PositiveInt
    """Size of the draft vocabulary."""
    window: int = Field(ge=1, le=64)
    """Tokens that it was trained to draft one after the other."""


def save(head: DraftHead, directory: Path, *, vocab_size: int, window: int) -> None:
    """Write a head. Each file is complete or as it was before.

    `vocab_size`: that of the policy. `window`: see `HeadSettings`. Raise OSError if writing fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings = HeadSettings(
        hidden_size=head.hidden_size,
        inner_size=head.inner_size,
        vocab_size=vocab_size,
        num_draft_tokens=len(head.token_ids),
        window=window,
    )
    state = head.state_dict().items()
    with replacing(directory / WEIGHTS) as file:
        save_file({name: _as_saved(one) for name, one in state}, file)
    write_durably(directory / SETTINGS, settings.model_dump_json(indent=2) + "\n")


def load(directory: Path, *, hidden_size: int, vocab_size: int) -> DraftHead:
    """Return the head in a directory, float32 on the CPU.

    `hidden_size`, `vocab_size`: those of the policy. Raise ValueError if no head is there, or one
    that is damaged, of another version of refrain, or for another policy.
    """
    settings = read_settings(directory)
    given = (settings.hidden_size, settings.vocab_size)
    if given != (hidden_size, vocab_size):
        raise ValueError(
            f"{directory / SETTINGS} is for a model of hidden size {given[0]} and {given[1]} token "
            f"ids, but this model has {hidden_size} and {vocab_size}: make a head for this model "
            "with `refrain drafter train`"
        )
    token_ids = torch.zeros(settings.num_draft_tokens, dtype=torch.int64)
    head = DraftHead(hidden_size, token_ids, settings.inner_size)
    head.load_state_dict(_tensors(directory / WEIGHTS, head))
    if not 0 <= head.token_ids.min() <= head.token_ids.max() < vocab_size:
        raise ValueError(
            f"{directory / WEIGHTS} has a draft vocabulary with token ids outside 0 to "
            f"{vocab_size - 1}: {_REMEDY}"
        )
    return head


def read_settings(directory: Path) -> HeadSettings:
    """Return the sizes of the head in a directory. Raise ValueError as `load` does."""
    missing = [name for name in (SETTINGS, WEIGHTS) if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"{directory} has no {' and no '.join(missing)}: name the directory of a draft head, "
            "which `refrain drafter train` makes"
        )
    file = directory / SETTINGS
    try:
        return HeadSettings.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{file} is damaged or of another version of refrain ({where}: {first['msg']}): "
            f"{_REMEDY}"
        ) from error


def _as_saved(tensor: Tensor) -> Tensor:
    wide = tensor.detach().float() if tensor.is_floating_point() else tensor
    return wide.cpu().contiguous()


def _tensors(file: Path, head: DraftHead) -> dict[str, Tensor]:
    """Return the weights in a file. Raise ValueError if they do not fit this head."""
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({error}): {_REMEDY}") from error
    found = {name: tuple(one.shape) for name, one in tensors.items()}
    expected = {name: tuple(one.shape) for name, one in head.state_dict().items()}
    if found != expected:
        raise ValueError(f"{file} has {found}, but {SETTINGS} needs {expected}: {_REMEDY}")
    if wrong := [name for name, one in tensors.items() if not torch.isfinite(one).all()]:
        raise ValueError(f"{file} has values in {', '.join(wrong)} that are not finite: {_REMEDY}")
    return tensors
