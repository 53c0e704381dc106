"""Check, before anything starts, that a directory is a causal language model. Read no tensors."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

from refrain.engines.learn.weight_files import INDEX, WHOLE, StoredTensor, stored_tensors
from refrain.engines.user_files import read_json_object

CAUSAL_LM_SUFFIXES = ("ForCausalLM", "LMHeadModel")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
MAX_COUNT = 1_000_000
"""Largest number of anything in a config, for example of heads, positions or layers."""
MAX_WIDTH = 2**24
"""Largest width or vocabulary."""
WIDTHS = ("_dim", "_size", "_rank", "_embd", "_inner", "_model", "_factor")
"""Ends of the names of widths and vocabulary sizes."""


def check_model_dir(path: Path, setting: str = "model.path") -> None:
    """Refuse a directory that cannot be trained. `setting` is the name of its setting in the
    message.

    Raises ValueError that says what is wrong, where, and how to fix it. It refuses a missing
    directory, a missing or broken `config.json`, an adapter, a quantised model, a model that is not
    a causal language model, pickles, missing or truncated weights, fewer weights than layers, and a
    missing tokenizer.
    """
    try:
        _check_dir(path)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error


def check_target_modules(path: Path, names: Sequence[str]) -> None:
    """Raise ValueError if adapters target layers that the model does not have. The message lists
    its layers."""
    weights = stored_tensors(path)
    layers = {name.split(".")[-2] for name in weights if "." in name}
    if unknown := sorted(set(names) - layers):
        raise ValueError(
            f"trainer.lora.target_modules: {path} has no layers called "
            f"{', '.join(unknown)}; it has {', '.join(sorted(layers))}"
        )


def _check_dir(path: Path) -> None:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(
            f"{path} {what}; give the local directory of a Hugging Face model, for "
            "example one made by `hf download NAME --local-dir DIR`"
        )
    config = _read_config(path)
    _check_config(config, path)
    _check_values(config, stored_tensors(path), path / "config.json")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{path} holds no tokenizer (one of {', '.join(TOKENIZER_FILES)}); save it "
            "there with `AutoTokenizer.from_pretrained(...).save_pretrained(DIR)`"
        )


def _read_config(path: Path) -> dict[str, Any]:
    file, adapter = path / "config.json", path / "adapter_config.json"
    if not file.is_file():
        hint = (
            "it is an adapter: merge it into its base model first"
            if adapter.is_file()
            else "give the directory that `save_pretrained` wrote"
        )
        raise ValueError(f"{path} has no config.json; {hint}")
    if adapter.exists():
        raise ValueError(
            f"{path} holds an adapter (adapter_config.json) beside a model. Engines would not "
            "load the adapter: merge it into the model, or move its files away"
        )
    return read_json_object(file)


def _check_config(config: dict[str, Any], path: Path) -> None:
    architectures = config.get("architectures") or []
    names = architectures if isinstance(architectures, list) else [architectures]
    if not any(str(name).endswith(CAUSAL_LM_SUFFIXES) for name in names):
        raise ValueError(
            f"{path / 'config.json'} names the architectures {architectures}, none of "
            "which is a causal language model (...ForCausalLM); give a model that generates text"
        )
    named = config.get("transformers_weights")
    if named not in (None, WHOLE, INDEX):
        raise ValueError(
            f"{path / 'config.json'} names another file of weights (transformers_weights="
            f"{named!r}): rename that file to {WHOLE}, and remove the setting"
        )
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"{path} is quantised (quantization_config in config.json); training needs "
            "the original weights in float32, bfloat16 or float16"
        )


def _check_values(config: Any, tensors: Mapping[str, StoredTensor], file: Path) -> None:
    """Raise ValueError for absurd numbers: building such a model would run out of memory."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_values(value, tensors, file)
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{file} has {name}={value}: copy it again from the model")
        if name == "rope_theta" and isinstance(value, int | float) and value <= 0:
            raise ValueError(f"{file} has rope_theta={value}: copy it again from the model")
        if isinstance(value, int | float) and abs(value) > _most(name, tensors):
            raise ValueError(
                f"{file} has {name}={value}, but its weights are {len(tensors)} tensors: copy both "
                "again from the model"
            )


def _most(name: str, tensors: Mapping[str, StoredTensor]) -> float:
    """Return the largest value of a setting, if the setting decides how much memory a model
    takes."""
    if not name.startswith(("num_", "n_")):
        return MAX_WIDTH if name.endswith(WIDTHS) else inf
    if "layer" in name:
        return len(tensors)
    if "expert" in name:
        return max([len(tensors), *(max(one.shape, default=0) for one in tensors.values())])
    return MAX_COUNT
