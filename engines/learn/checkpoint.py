"""Checkpoint directories: complete or not there.

```
checkpoints/global_step_12/
    model/                  a Hugging Face export, tokenizer included
    adapter/                the adapter alone, where one is trained
    training/               weights and optimiser, a file for each process
    training_state.pt       scheduler and random number generators
    state.json              step, policy version, data-loader state, size of every file
```

A checkpoint is written next to its final place, `state.json` last, flushed to the disk and then
renamed. One whose `state.json` is missing, or whose files do not have the recorded sizes, is
treated as if it were not there.
"""

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, ValidationError

from engines.durable import (
    disk_full,
    flush,
    flush_all,
    is_disk_full,
    require_space,
    write_durably,
)
from schemas.base import Frozen
from schemas.config import TrainConfig

MODEL_DIR = "model"
ADAPTER_DIR = "adapter"
TRAINING_DIR = "training"
TRAINING_STATE_FILE = "training_state.pt"
STATE_FILE = "state.json"


class CheckpointState(Frozen):
    """State that a run needs to go on from a checkpoint."""

    step: NonNegativeInt
    """The last step in it."""
    policy_version: NonNegativeInt
    loader_state: dict[str, Any]
    """The data loader's own state, JSON values only."""
    file_bytes: dict[str, NonNegativeInt] = {}
    """Size of every other file, by its path within the checkpoint."""


def checkpoints_dir(config: TrainConfig) -> Path:
    """Directory in which a run keeps its checkpoints."""
    return config.run_dir / "checkpoints"


def checkpoint_name(step: int) -> str:
    return f"global_step_{step}"


def unfinished_dir(directory: Path, step: int) -> Path:
    """Directory of a step's checkpoint until all its files are there."""
    return directory / f".unfinished_{checkpoint_name(step)}"


def write_checkpoint(
    directory: Path,
    state: CheckpointState,
    write_files: Callable[[Path], None],
    num_bytes: int = 0,
) -> Path:
    """Write `global_step_N/` so that it appears whole, after a crash too; returns it.

    `write_files` fills the directory it is given, with `num_bytes` or little more. A checkpoint of
    the same step is replaced. Raises OSError that names the disk when it has too little room; the
    checkpoints that are there stay.
    """
    final = directory / checkpoint_name(state.step)
    unfinished = unfinished_dir(directory, state.step)
    _remove_unfinished(directory)
    unfinished.mkdir(parents=True)
    require_space(directory, f"checkpoint {final.name}", num_bytes)
    try:
        write_files(unfinished)
        state = state.model_copy(update={"file_bytes": _file_bytes(unfinished)})
        flush_all(unfinished)
        write_durably(unfinished / STATE_FILE, state.model_dump_json(indent=2))
    except Exception as error:
        written = sum(_file_bytes(unfinished).values())
        _remove(unfinished)
        if not is_disk_full(error):
            raise
        raise disk_full(directory, f"checkpoint {final.name}", num_bytes, written) from error
    if final.exists():
        replaced = directory / f".unfinished_replaced_{checkpoint_name(state.step)}"
        _remove(replaced)
        final.rename(replaced)
    unfinished.rename(final)
    flush(directory)
    return final


def read_state(checkpoint_dir: Path) -> CheckpointState:
    """State of a complete checkpoint. Raises ValueError that says what is wrong with one that is
    unfinished or damaged."""
    file = checkpoint_dir / STATE_FILE
    try:
        state = CheckpointState.model_validate_json(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{checkpoint_dir} is no finished checkpoint: no {STATE_FILE}") from error
    except (UnicodeDecodeError, ValidationError) as error:
        raise ValueError(f"{file} is damaged: {error}; use an earlier checkpoint") from error
    for name, num_bytes in state.file_bytes.items():
        part = checkpoint_dir / name
        if not part.is_file() or part.stat().st_size != num_bytes:
            raise ValueError(
                f"{part} is missing or has not the {num_bytes} bytes it was written with; "
                "use an earlier checkpoint"
            )
    return state


def named_checkpoints(directory: Path) -> list[Path]:
    """Directories with a checkpoint's name, whole or not, oldest step first."""
    matches = (re.fullmatch(r"global_step_(\d+)", path.name) for path in directory.glob("*"))
    steps = sorted(int(match[1]) for match in matches if match)
    return [directory / checkpoint_name(step) for step in steps]


def complete_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints that can be restored, oldest step first."""
    found = []
    for path in named_checkpoints(directory):
        with suppress(ValueError):
            read_state(path)
            found.append(path)
    return found


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that can be restored, or None."""
    return next(reversed(complete_checkpoints(directory)), None)


def prune_checkpoints(directory: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest `keep`, and what a crash left unfinished."""
    assert keep > 0
    for path in complete_checkpoints(directory)[:-keep]:
        # Renamed first: a half-removed directory must not look like a checkpoint.
        doomed = path.rename(directory / f".unfinished_removed_{path.name}")
        _remove(doomed)
    _remove_unfinished(directory)


def _remove_unfinished(directory: Path) -> None:
    for path in directory.glob(".unfinished_*"):
        _remove(path)


def _file_bytes(directory: Path) -> dict[str, int]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
