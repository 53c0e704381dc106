"""Write a trained model as a Hugging Face directory: new weights, and files copied from the start.

```
model/
    model.safetensors         trained; a large model has an index and shards
    config.json               the start's, byte for byte, unless its data type has changed
    tokenizer.json, ...       the start's, byte for byte
    refrain_export.json       says which file is which, and what was left out
```

The start is the model directory that training began with. transformers would rewrite the files
beside the weights and keep only the settings that it understands, so this module copies them.

Files that loaders read are always copied, even behind links. Others are copied while there is room,
except weights, caches and links that lead out of the directory.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from refrain.engines.learn.weight_files import INDEX, WHOLE, listed
from refrain.engines.user_files import MAX_TEXT_BYTES, read_json_object

CONFIG = "config.json"
PATTERN = "model{suffix}.safetensors"
"""Names of the weight files."""
MANIFEST = "refrain_export.json"
"""File of an export that says where its files come from."""
TEMPLATES = "additional_chat_templates"
"""Folder from which transformers reads more chat templates."""
LOADED = (
    *(CONFIG, "generation_config.json", "*processor_config.json", "*.py"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.model", "*.tiktoken"),
    *("chat_template.json", "chat_template.jinja"),
)
"""Files that transformers and vLLM read, besides the weights and `TEMPLATES`."""
WEIGHTS = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.ckpt.*", "*.pkl"),
    *("*.pickle", "*.joblib", "*.gguf", "*.ggml", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data"),
    *("*.npy", "*.npz", "*.ot", "*.tflite", "*.nemo", "*.llamafile", "*.distcp", "*.engine"),
)
"""Weight files, which an export replaces, and pickles."""
MAX_OTHER_BYTES = 64 * 2**20
"""Most bytes of all files together that no loader reads."""
MAX_FILES = 1000
"""Number of files after which no further folder is searched."""


class LeftOut(StrEnum):
    """Why a file or folder is not copied."""

    WEIGHTS = "weights or a pickle"
    CACHE = "hidden or a cache"
    THIS_RUN = "holds this run"
    MANIFEST = "of an earlier export"
    LINK = "a link out of the directory"
    TOO_LARGE = "too large"
    UNREADABLE = "cannot be read"


EXPECTED = {LeftOut.WEIGHTS, LeftOut.CACHE, LeftOut.THIS_RUN, LeftOut.MANIFEST}
"""Reasons that need no warning."""


@dataclass(frozen=True, slots=True)
class StartFiles:
    """Files of a start: those that exports copy, and those that they leave out."""

    start: Path
    copied: dict[str, int]
    """Size of each file, by its path in the directory."""
    left_out: dict[str, LeftOut]
    """Reason for each file or folder, by its path in the directory. Folders end with a slash."""

    @property
    def num_bytes(self) -> int:
        return sum(self.copied.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """A warning if a file was left out that the model may need."""
        missed = [name for name, reason in self.left_out.items() if reason not in EXPECTED]
        if not missed:
            return ()
        return (
            f"checkpoints leave out {listed(missed)} of {self.start} "
            f"({self.left_out[missed[0]]}): put the files themselves there if the model needs them",
        )


def find_start_files(start: Path, checkpoints: Path | None = None) -> StartFiles:
    """Choose the files of a start that exports copy. `checkpoints`: where exports go; this may be a
    folder of the start."""
    files, room = StartFiles(start, {}, {}), MAX_OTHER_BYTES
    for name in _walk(files, checkpoints or start):
        reason = _reason_of_file(start, name)
        loaded = _is_loaded(name)
        num_bytes = 0 if reason else (start / name).stat().st_size
        if num_bytes > (MAX_TEXT_BYTES if loaded else room):
            reason = LeftOut.TOO_LARGE
        if reason:
            files.left_out[_printable(name)] = reason
            continue
        files.copied[name] = num_bytes
        room -= 0 if loaded else num_bytes
    return files


def write_export(
    model: PreTrainedModel, tensors: dict[str, Tensor], files: StartFiles, directory: Path
) -> None:
    """Write a model directory from whole tensors, all of one data type, and a start's files."""
    directory.mkdir()
    (dtype,) = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    _write_weights(revert_weight_conversion(model, tensors), directory)
    trained = sorted(file.name for file in directory.iterdir())
    for name in files.copied:
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files.start / name, target)
    changed = _fit_config(directory, dtype)
    manifest = {
        "start": str(files.start),
        "trained": trained,
        "changed": {CONFIG: changed} if changed else {},
        "copied": [name for name in files.copied if not (name == CONFIG and changed)],
        "left_out": files.left_out,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _write_weights(tensors: dict[str, Tensor], directory: Path) -> None:
    """Write the weights as transformers does, in shards if they are large."""
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=PATTERN)
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name].contiguous() for name in names}
        save_file(shard, directory / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _fit_config(directory: Path, dtype: str) -> dict[str, str]:
    """Set the data type and weight file in the config. Return the changed values; if there are
    none, the file keeps its bytes."""
    file, changed = directory / CONFIG, {}
    config = read_json_object(file)
    for part in _parts(config):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) not in (None, dtype, f"torch.{dtype}"):
                part[key] = changed[key] = dtype
    weights = WHOLE if (directory / WHOLE).exists() else INDEX
    if config.get("transformers_weights") not in (None, weights):
        config["transformers_weights"] = changed["transformers_weights"] = weights
    if changed:
        file.write_text(json.dumps(config, indent=2) + "\n")
    return changed


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and all configs nested in it."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(value)


def _walk(files: StartFiles, checkpoints: Path) -> Iterator[str]:
    """Yield the paths of files in the start. A folder's files come before those of its
    subfolders."""
    folders, num_files = deque([""]), 0
    while folders:
        folder = folders.popleft()
        for entry in sorted(os.listdir(files.start / folder)):
            name = folder + entry
            if not os.path.isdir(files.start / name):
                num_files += 1
                yield name
            elif reason := _reason_of_folder(files.start, name, checkpoints, num_files):
                files.left_out[_printable(f"{name}/")] = reason
            else:
                folders.append(f"{name}/")


def _reason_of_folder(start: Path, name: str, checkpoints: Path, num_files: int) -> LeftOut | None:
    folder = start / name
    if folder.name.startswith(".") or folder.name == "__pycache__":
        return LeftOut.CACHE
    if checkpoints.resolve().is_relative_to(folder.resolve()) and not folder.is_symlink():
        return LeftOut.THIS_RUN
    if name != TEMPLATES and (folder.is_symlink() or num_files > MAX_FILES):
        return LeftOut.LINK if folder.is_symlink() else LeftOut.TOO_LARGE
    return None if os.access(folder, os.R_OK | os.X_OK) else LeftOut.UNREADABLE


def _reason_of_file(start: Path, name: str) -> LeftOut | None:
    file = start / name
    if name == MANIFEST:
        return LeftOut.MANIFEST
    if file.name == ".git":  # A file in a submodule or a linked work tree.
        return LeftOut.CACHE
    if any(fnmatchcase(file.name.lower(), pattern) for pattern in WEIGHTS):
        return LeftOut.WEIGHTS
    # A name that is not UTF-8 does not fit into a checkpoint's `state.json`.
    if not (os.path.isfile(file) and os.access(file, os.R_OK)) or _printable(name) != name:
        return LeftOut.UNREADABLE
    return None if _is_loaded(name) or _is_inside(file, start) else LeftOut.LINK


def _is_loaded(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    if folder:
        return folder == TEMPLATES and file.endswith(".jinja")
    return any(fnmatchcase(file, pattern) for pattern in LOADED)


def _is_inside(file: Path, start: Path) -> bool:
    """Return whether a file lies in the directory, or where the Hugging Face cache keeps its
    files."""
    own, target = start.resolve(), Path(os.path.realpath(file))
    in_cache = own.parent.name == "snapshots"
    return target.is_relative_to(own) or (
        in_cache and target.is_relative_to(own.parent.parent / "blobs")
    )


def _printable(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()
