"""Save and load draft heads.

DIRECTORY/head.safetensors    the weights, float32
DIRECTORY/head.json           the sizes (`settings.HeadSettings`)
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engines.draft_head.model import DraftHead
from engines.draft_head.settings import SETTINGS, WEIGHTS, HeadSettings, read_settings
from engines.durable import replacing, write_durably


def save(head: DraftHead, directory: Path, *, vocab_size: int, window: int) -> None:
    """Write a head. Each file is complete or as it was before.

    `vocab_size`: that of the policy. `window`: see `HeadSettings`. Raise OSError if writing fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings = HeadSettings(
        hidden_size=head.hidden_size,
        inner_size=head.inner_size,
        vocab_size=vocab_size,
        window=window,
    )
    tensors = {name: one.detach().float().cpu() for name, one in head.state_dict().items()}
    with replacing(directory / WEIGHTS) as file:
        save_file({name: one.contiguous() for name, one in tensors.items()}, file)
    write_durably(directory / SETTINGS, settings.model_dump_json(indent=2) + "\n")


def load(directory: Path, *, hidden_size: int, vocab_size: int) -> DraftHead:
    """Return the head in a directory, float32 on the CPU.

    `hidden_size`, `vocab_size`: those of the policy. Raise ValueError as `read_settings` does, and
    if the weights are damaged or of another shape.
    """
    settings = read_settings(directory, hidden_size, vocab_size)
    file = directory / WEIGHTS
    head = DraftHead(settings.hidden_size, settings.inner_size)
    try:
        tensors = load_file(file)
        head.load_state_dict(tensors)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{file} is damaged or does not fit {SETTINGS}: make the head again with "
            f"`refrain drafter train` ({error})"
        ) from error
    if wrong := [name for name, one in tensors.items() if not torch.isfinite(one).all()]:
        raise ValueError(
            f"{file} has numbers that are not finite in {', '.join(wrong)}: make the head again "
            "with `refrain drafter train`"
        )
    return head
