"""Data sets and models from the Hugging Face Hub, or from its cache on this machine.

An environment that is offline (`HF_HUB_OFFLINE=1`), a Hub that cannot be reached and a name that is
not there are three errors, each with its mend.
"""

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.reading import first_line
from schemas.config import TrainConfig

OFFLINE = "HF_HUB_OFFLINE"


def is_hub_name(path: Path | str) -> bool:
    """Whether this may be a repository (`Qwen/Qwen3-1.7B`) rather than a file or directory: two
    parts, of which the first is no directory here."""
    parts = str(path).split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        return False
    return not Path(parts[0]).is_dir()


def hub_rows(
    repository: str, subset: str | None, split: str, revision: str | None
) -> Iterable[Mapping[str, Any]]:
    """Rows of a data set's split. Raises ValueError."""
    from datasets import load_dataset

    with _told(f"data set {repository}", "give its files by --from"):
        return load_dataset(repository, subset, split=split, revision=revision)


def with_local_model(config: TrainConfig) -> TrainConfig:
    """The same config with a directory for its model, downloaded where it is named as on the Hub.
    Raises ValueError."""
    model = config.model
    if model.path.exists() or not is_hub_name(model.path):
        return config
    directory = model_directory(str(model.path), model.revision)
    return config.model_copy(update={"model": model.model_copy(update={"path": directory})})


def model_directory(repository: str, revision: str | None) -> Path:
    """Directory of a model's files, downloaded where they are not there yet. Raises ValueError."""
    from huggingface_hub import snapshot_download

    unneeded = ["*.bin", "*.pth", "*.gguf", "*.h5", "*.msgpack", "original/*"]
    with _told(
        f"model {repository}", "set model.path to a directory, as there is none of this name"
    ):
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

    # Whatever library noticed it, and `datasets` has classes of its own for some.
    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(
            f"there is no {what} on the Hub, or it wants a login (`hf auth login`): {error}"
        ) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if os.environ.get(OFFLINE, "0") not in ("", "0"):
            raise ValueError(
                f"{what} is not in this machine's cache, and {OFFLINE} is set, as it is in a run "
                f"that was started in the browser: `hf download` it, unset that, or {instead}"
            ) from error
        raise ValueError(
            f"the Hub cannot be reached for the {what} ({first_line(error, 200)}): try again with "
            f"a network, or {instead}"
        ) from error
