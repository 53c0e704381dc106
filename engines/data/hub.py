"""Load data sets and models from the Hugging Face Hub, or from its cache on this machine.

Errors tell three cases apart, each with its fix: the environment is offline (`HF_HUB_OFFLINE=1`),
the Hub cannot be reached, or the Hub has no such name.
"""

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refrain.engines.user_files import first_line
from refrain.schemas.config import TrainConfig

OFFLINE = "HF_HUB_OFFLINE"


def is_hub_name(path: Path | str) -> bool:
    """Whether this may be a repository (for example `Qwen/Qwen3-1.7B`) rather than a path: it has
    two parts, and the first is not a directory here."""
    parts = str(path).split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        return False
    return not Path(parts[0]).is_dir()


def hub_rows(
    repository: str, subset: str | None, split: str, revision: str | None
) -> Iterable[Mapping[str, Any]]:
    """Return the rows of a split of a data set on the Hub, or in a local directory. Raises
    ValueError."""
    from datasets import load_dataset

    if (directory := Path(repository)).is_dir() and not any(directory.iterdir()):
        raise ValueError(f"{repository} is empty: give a directory with Parquet or JSONL files")
    with _told(f"data set {repository}", "name local files with --from"):
        try:
            return load_dataset(repository, subset, split=split, revision=revision)
        except ValueError as error:
            said = " ".join(str(error).split())
            raise ValueError(
                f"data set {repository}: {said}: choose with --subset and --split"
            ) from error


def with_local_model(config: TrainConfig) -> TrainConfig:
    """Return the config with a local directory as its model. Download the model if `model.path` is
    a name on the Hub. Raises ValueError."""
    model = config.model
    if model.path.exists() or not is_hub_name(model.path):
        return config
    directory = model_directory(str(model.path), model.revision)
    return config.model_copy(update={"model": model.model_copy(update={"path": directory})})


def model_directory(repository: str, revision: str | None) -> Path:
    """Return the directory of a model's files. Download missing files. Raises ValueError."""
    from huggingface_hub import snapshot_download

    unneeded = ["*.bin", "*.pth", "*.gguf", "*.h5", "*.msgpack", "original/*"]
    with _told(f"model {repository}", "set model.path to a directory that exists"):
        return Path(snapshot_download(repository, revision=revision, ignore_patterns=unneeded))


@contextmanager
def _told(what: str, instead: str) -> Generator[None]:
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # Both libraries raise these classes. Some errors of `datasets` are subclasses of OSError.
    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(
            f"there is no {what} on the Hub, or it needs a login (`hf auth login`): {error}"
        ) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if os.environ.get(OFFLINE, "0") not in ("", "0"):
            raise ValueError(
                f"{what} is not in this machine's cache, and {OFFLINE} is set (runs started in the "
                f"browser set it). Run `hf download`, unset the variable, or {instead}"
            ) from error
        raise ValueError(
            f"the Hub cannot be reached for the {what} ({first_line(error, 200)}): check the "
            f"network and try again, or {instead}"
        ) from error
