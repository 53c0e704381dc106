"""Is this directory a causal language model? Asked before anything is started; reads no tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engines.reading import read_json_object

KNOWN_HEADS = {
    *("cohere", "gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3"),
    *("qwen2", "qwen3", "qwen3_moe"),
}
"""Model types whose logits `engines.learn.head` makes as they do."""
CAUSAL_LM_SUFFIXES = ("ForCausalLM", "LMHeadModel")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_model_dir(path: Path, setting: str = "model.path") -> None:
    """Refuse a directory that cannot be trained. `setting` names it in the message.

    Raises ValueError that says what is wrong, where, and how to mend it: no directory, no or a
    broken `config.json`, an adapter, a quantised model, not a causal language model, weights
    missing or cut short, or no tokenizer.
    """
    try:
        _check_dir(path)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error


def check_target_modules(path: Path, names: Sequence[str]) -> None:
    """Refuse adapters for layers that a model has not. Raises ValueError that names some it has."""
    weights: set[str] = set()
    for file in _weight_files(path):
        if file.suffix != ".safetensors":
            return
        with safe_open(file, "numpy") as tensors:
            weights.update(tensors.keys())
    layers = {name.split(".")[-2] for name in weights if name.count(".") > 1}
    if unknown := sorted(set(names) - layers):
        raise ValueError(
            f"trainer.lora.target_modules: {path} has no layers that are called "
            f"{', '.join(unknown)}; it has {', '.join(sorted(layers))}"
        )


def _check_dir(path: Path) -> None:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(
            f"{path} {what}; give the local directory of a Hugging Face model, for "
            "instance one made by `hf download NAME --local-dir DIR`"
        )
    _check_config(_read_config(path), path)
    _check_weights(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{path} holds no tokenizer (one of {', '.join(TOKENIZER_FILES)}); save it "
            "there with `AutoTokenizer.from_pretrained(...).save_pretrained(DIR)`"
        )


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        hint = (
            "it is an adapter: merge it into its base model first"
            if (path / "adapter_config.json").is_file()
            else "give the directory that `save_pretrained` wrote"
        )
        raise ValueError(f"{path} has no config.json; {hint}")
    return read_json_object(file)


def _check_config(config: dict[str, Any], path: Path) -> None:
    architectures = config.get("architectures") or []
    names = architectures if isinstance(architectures, list) else [architectures]
    if not any(str(name).endswith(CAUSAL_LM_SUFFIXES) for name in names):
        raise ValueError(
            f"{path / 'config.json'} names the architectures {architectures}, none of "
            "which is a causal language model (...ForCausalLM); give a model that generates text"
        )
    if "quantization_config" in config:
        raise ValueError(
            f"{path} is quantised (quantization_config in config.json); training needs "
            "the original weights in float32, bfloat16 or float16"
        )


def _check_weights(path: Path) -> None:
    files = _weight_files(path)
    if not files:
        raise ValueError(
            f"{path} holds no weights (*.safetensors or pytorch_model*.bin); download "
            "them or give another directory"
        )
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is named in the index but missing; download it")
        if file.suffix == ".safetensors":
            _check_whole(file)


def _weight_files(path: Path) -> list[Path]:
    for index in INDEX_FILES:
        if (path / index).is_file():
            weight_map = read_json_object(path / index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{path / index} has no weight_map: download it again")
            return [path / str(name) for name in sorted(set(map(str, weight_map.values())))]
    return sorted([*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")])


def _check_whole(file: Path) -> None:
    """The header of a safetensors file says how long the file is."""
    try:
        with safe_open(file, "numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file} is no complete safetensors file; it is cut short or a Git LFS "
            "pointer: download it again"
        ) from error
