"""Read the headers of the safetensors files in a model directory, but no weights.

    model.safetensors                       all weights, or
    model.safetensors.index.json            the file of each weight
    model-00001-of-00002.safetensors ...

Trainer, engines and drafters choose files by different rules. A directory is refused if these rules
could disagree. Files may be links, as in the Hugging Face cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open

from refrain.engines.user_files import read_json_object

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Data types of weights that can be trained, as safetensors calls them."""
SHOWN = 3
MAX_NAME = 150
"""Number of names in a message, and of characters of each name."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.bin.index.json")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its header describes it."""

    file: Path
    dtype: str
    """Data type as safetensors calls it, for example BF16."""
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the weights of a model directory by name.

    Raises ValueError for pickles, for missing or damaged files, for files outside the directory,
    for an index that does not match its files, and for a weight that appears twice.
    """
    index = path / INDEX
    if not index.is_file():
        return _headers(_lone_file(path))
    places = _weight_map(index)
    names = sorted(set(places.values()))
    if WHOLE not in names and (path / WHOLE).exists():
        raise ValueError(
            f"{path} holds {WHOLE}, but its {INDEX} names other files, so it is unclear which "
            "files are the weights. Move one of the two away"
        )
    found: dict[str, StoredTensor] = {}
    for name in names:
        _add(found, _headers(path / name))
    _check_index(index, places, found)
    for file in sorted(path.glob("*.safetensors")):
        if file.name not in names:
            # The sharded trainer reads every file in the directory.
            _add(dict(found), _headers(file))
    return found


def _lone_file(path: Path) -> Path:
    files = sorted(file.name for file in path.glob("*.safetensors"))
    others = [name for name in files if name != WHOLE]
    if not files:
        raise ValueError(_without_safetensors(path))
    if WHOLE not in files:
        raise ValueError(
            f"{path} holds {listed(others)}, but no {INDEX} that says which weight is where: "
            f"download it, or rename the only file to {WHOLE}"
        )
    if others:
        raise ValueError(
            f"{path} holds {listed(others)} beside {WHOLE}, and engines would read them all: move "
            "away the files that do not belong to this model"
        )
    return path / WHOLE


def _without_safetensors(path: Path) -> str:
    pickles = sorted({file.name for pattern in _PICKLES for file in path.glob(pattern)})
    if not pickles:
        return f"{path} holds no weights ({WHOLE}, or {INDEX} and its files); download them"
    return (
        f"{path} has its weights in {listed(pickles)}: pickles, which can run any code when they "
        "are read. refrain does not read them. Download the model's safetensors files. If you "
        "trust this model, convert it: `AutoModelForCausalLM.from_pretrained(DIR)"
        ".save_pretrained(NEW_DIR)`, and do the same with AutoTokenizer"
    )


def _weight_map(index: Path) -> dict[str, str]:
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} has no weight_map: download it again")
    for name, file in places.items():
        if not isinstance(file, str) or PurePath(file).name != file or "\0" in file:
            raise ValueError(
                f"{index} has {listed([name])} in {_cut(repr(file))}, which is no file of this "
                "directory: download the index again"
            )
        if not file.endswith(".safetensors"):
            raise ValueError(
                f"{index} has {listed([name])} in {_cut(repr(file))}, which is no safetensors "
                "file: convert the model with `save_pretrained`"
            )
    return places


def _check_index(index: Path, places: Mapping[str, str], found: Mapping[str, StoredTensor]) -> None:
    for name, file in places.items():
        if name not in found or found[name].file.name != file:
            raise ValueError(
                f"{index} has {listed([name])} in {file}, which does not hold it: download both "
                "again"
            )
    if unlisted := sorted(found.keys() - places.keys()):
        raise ValueError(
            f"{index} does not list {listed(unlisted)}, which its files hold: download both again"
        )


def _add(found: dict[str, StoredTensor], more: Mapping[str, StoredTensor]) -> None:
    if twice := sorted(found.keys() & more.keys()):
        first, second = found[twice[0]].file, more[twice[0]].file
        raise ValueError(
            f"{first} and {second.name} both hold {listed(twice)}, so it is unclear which is "
            "right. Move away the file that does not belong to this model"
        )
    found.update(more)


def _headers(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file. Raise ValueError if its size does not match its header."""
    if not file.exists():
        raise ValueError(f"{file} is named in the index but missing; download it")
    if not file.is_file():
        raise ValueError(f"{file} is not a file: download it again")
    try:
        with safe_open(file, "numpy") as tensors:
            names = list(tensors.keys())
            return {name: _stored(file, tensors.get_slice(name)) for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file} is not a complete safetensors file: it is cut short, or a Git LFS "
            f"pointer. Download it again ({error})"
        ) from error


def _stored(file: Path, tensor: Any) -> StoredTensor:
    return StoredTensor(file, tensor.get_dtype(), tuple(tensor.get_shape()))


def listed(names: Sequence[str]) -> str:
    """Return the first names for a message, cut short, and how many more there are."""
    first = [_cut(ascii(name)[1:-1]) for name in names[:SHOWN]]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(first) + more


def _cut(text: str) -> str:
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}..."
