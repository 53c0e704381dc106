"""Checkpoint directories. A checkpoint is either complete or ignored.

```
checkpoints/global_step_12/
    model/                  a Hugging Face export, tokenizer included
    adapter/                the adapter alone, if one is trained
    training/               weights and optimiser, a file for each process
    training_state.pt       scheduler and random number generators
    state.json              step, policy version, data-loader state; size and SHA-256 of every file
```

The trainer writes a checkpoint beside its final place, with `state.json` last. It flushes the files
to disk and then renames the directory. A checkpoint without `state.json`, or with a file of the
wrong size, is ignored. Code that loads a checkpoint verifies its checksums first.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, NonNegativeInt, ValidationError

from refrain.engines.checksums import sha256_of_all
from refrain.engines.durable import (
    disk_full,
    flush,
    flush_all,
    is_disk_full,
    require_space,
    write_durably,
)
from refrain.engines.user_files import first_problem, read_bytes
from refrain.schemas.base import Frozen
from refrain.schemas.config import TrainConfig

CHECKPOINTS = "checkpoints"
MODEL_DIR = "model"
ADAPTER_DIR = "adapter"
TRAINING_DIR = "training"
TRAINING_STATE_FILE = "training_state.pt"
STATE_FILE = "state.json"


def _inside(name: str) -> str:
    """Return the path of a file in a checkpoint. Raise ValueError for a path that leads out of
    it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or name in (".", STATE_FILE):
        raise ValueError(f"{name!r} is not the path of a file in this directory")
    return name


FileName = Annotated[str, AfterValidator(_inside)]


class CheckpointState(Frozen):
    """State that a run needs to resume from a checkpoint."""

    step: NonNegativeInt
    """The last step that the checkpoint contains."""
    policy_version: NonNegativeInt
    loader_state: dict[str, Any]
    """The data loader's own state. JSON values only."""
    file_bytes: dict[FileName, NonNegativeInt] = {}
    """Size of every other file, by its path in the checkpoint."""
    file_sha256: dict[FileName, str] = {}
    """Checksum of every other file."""
    own_sha256: str = ""
    """Checksum of all other fields."""

    def sealed(self) -> "CheckpointState":
        """Return the state with its own checksum."""
        text = self.model_dump_json(exclude={"own_sha256"})
        return self.model_copy(update={"own_sha256": hashlib.sha256(text.encode()).hexdigest()})


def checkpoints_dir(config: TrainConfig) -> Path:
    """Return the directory of a run's checkpoints."""
    return config.run_dir / CHECKPOINTS


def checkpoint_name(step: int) -> str:
    return f"global_step_{step}"


def unfinished_dir(directory: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint before it is complete."""
    return directory / f".unfinished_{checkpoint_name(step)}"


def write_checkpoint(
    directory: Path,
    state: CheckpointState,
    write_files: Callable[[Path], Mapping[str, str] | None],
    num_bytes: int = 0,
) -> Path:
    """Write `global_step_N/` atomically, even across a crash, and return its path.

    `write_files` fills the directory that it gets, and returns the checksums that it knows already,
    by file. `num_bytes` estimates how much it writes. An older checkpoint of the same step is
    replaced. Raises OSError that names the disk when it is full; existing checkpoints stay.
    """
    final = directory / checkpoint_name(state.step)
    unfinished = unfinished_dir(directory, state.step)
    _remove_unfinished(directory)
    unfinished.mkdir(parents=True)
    require_space(directory, f"checkpoint {final.name}", num_bytes)
    try:
        known = write_files(unfinished) or {}
        sizes = _file_bytes(unfinished)
        found = sha256_of_all(unfinished / name for name in sizes if name not in known)
        checksums = {name: known.get(name) or found[unfinished / name] for name in sizes}
        state = state.model_copy(update={"file_bytes": sizes, "file_sha256": checksums}).sealed()
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
    """Return the state of a complete checkpoint. Raise ValueError that says what is wrong when the
    checkpoint is unfinished or damaged."""
    file = checkpoint_dir / STATE_FILE
    if not file.is_file():
        raise ValueError(f"{checkpoint_dir} is not a complete checkpoint: it has no {STATE_FILE}")
    content = read_bytes(file)
    state = parse_state(content, file)
    place = checkpoint_dir.resolve()
    for name, num_bytes in state.file_bytes.items():
        part = checkpoint_dir / name
        if not part.resolve().is_relative_to(place):
            raise ValueError(f"{part} leads out of the checkpoint: put the file itself there")
        if not part.is_file() or part.stat().st_size != num_bytes:
            raise ValueError(
                f"{part} is missing, or its size is not the {num_bytes} bytes that were written; "
                "use an earlier checkpoint"
            )
    return state


def parse_state(content: bytes, source: object) -> CheckpointState:
    """Parse the content of a state file. Raise ValueError when it is damaged; the message names
    `source`."""
    try:
        state = CheckpointState.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(
            f"{source} is damaged ({first_problem(error)}); use an earlier checkpoint"
        ) from error
    if not state.own_sha256:
        raise ValueError(
            f"{source} has no checksum: refrain 0.1 wrote it, whose runs this version cannot "
            "resume. Start a new run with the checkpoint's folder `model` as model.path"
        )
    if state != state.sealed():
        raise ValueError(
            f"{source} is damaged: its checksum is not the one it was written with; use an earlier "
            "checkpoint"
        )
    return state


def verify(
    checkpoint_dir: Path, within: str = "", rank: int = 0, world_size: int = 1
) -> CheckpointState:
    """Verify a checkpoint's checksums and return its state.

    Only files whose paths start with `within` are read, and each rank reads its share of them.
    Raises ValueError as `read_state` does, and when a checksum differs.
    """
    state = read_state(checkpoint_dir)
    names = sorted(name for name in state.file_sha256 if name.startswith(within))[rank::world_size]
    found = sha256_of_all(checkpoint_dir / name for name in names)
    for name in names:
        if found[checkpoint_dir / name] != state.file_sha256[name]:
            raise ValueError(
                f"{checkpoint_dir / name} is damaged: its SHA-256 is not the one it was written "
                f"with, in {STATE_FILE}; use an earlier checkpoint, or a copy of this one"
            )
    return state


def verify_model(model: Path) -> None:
    """Verify a model directory if it is part of a checkpoint; others have no checksums. Raise
    ValueError when it is damaged."""
    if model.name == MODEL_DIR and (model.parent / STATE_FILE).is_file():
        verify(model.parent, f"{model.name}/")


def newest_verified(directory: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest valid checkpoint, or None, and what is wrong with the newer ones."""
    damaged: dict[Path, str] = {}
    for path in reversed(named_checkpoints(directory)):
        try:
            verify(path)
        except ValueError as error:
            damaged[path] = str(error)
        else:
            return path, damaged
    return None, damaged


def named_checkpoints(directory: Path) -> list[Path]:
    """Return directories with a checkpoint's name, complete or not, oldest step first."""
    matches = (re.fullmatch(r"global_step_(\d+)", path.name) for path in directory.glob("*"))
    steps = sorted(int(match[1]) for match in matches if match)
    return [directory / checkpoint_name(step) for step in steps]


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints that can be restored, oldest step first."""
    found = []
    for path in named_checkpoints(directory):
        with suppress(ValueError):
            read_state(path)
            found.append(path)
    return found


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest checkpoint that can be restored, or None."""
    return next(reversed(complete_checkpoints(directory)), None)


def prune_checkpoints(directory: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest `keep`, and all unfinished ones."""
    assert keep > 0
    for path in complete_checkpoints(directory)[:-keep]:
        # Rename first: a half-removed directory must not look like a checkpoint.
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
    if path.is_symlink():
        path.unlink()
    elif os.path.lexists(path):
        shutil.rmtree(path)
