"""Check that a directory's weights fit its config, with transformers' own loading but no memory.

    config.json ─► the model on the meta device ─┐
                                                 ├─► transformers' report: missing, unexpected,
    headers ────► tensors on the meta device ────┘   of another shape

The check therefore treats renamed keys, merged experts, tied weights and ignored keys as loading
does.
"""

import logging
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    get_logger,
    is_progress_bar_enabled,
)

from refrain.engines.learn.weight_files import FLOATS, StoredTensor, listed
from refrain.engines.user_files import first_line
from refrain.schemas.inputs import ModelConfig

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PUT_TOGETHER = re.compile(r"tensors destined for (\S+)\.\s")
"""How transformers' report names a weight that it builds from several tensors."""


def check_weights_fit(
    given: ModelConfig, config: PretrainedConfig, tensors: Mapping[str, StoredTensor]
) -> None:
    """Raise ValueError when a directory's weights do not fit its config: too few, too many, of
    another shape, or of an integer type."""
    path = given.path
    try:
        with quiet() as records:
            model, report = _rehearse(config, tensors, given.trust_remote_code)
    except Exception as error:  # Each model type checks its values in its own way.
        _refuse_whole_numbers(path, tensors)
        raise ValueError(
            f"{path / 'config.json'} describes no model that its weights fit: "
            f"{_reason(error, ''.join(record.getMessage() for record in records))}"
        ) from error
    _check_class(path, config, model)
    if report["missing_keys"]:
        _refuse_whole_numbers(path, tensors)
    _check_report(path, report)


def _reason(error: Exception, said: str) -> str:
    """Return the first line of an error, or name the tensors that could not be merged."""
    names = sorted(set(_PUT_TOGETHER.findall(said)))
    if names:
        return f"the tensors that are merged into {listed(names)} do not fit each other"
    return first_line(error)


def _refuse_whole_numbers(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    whole = [name for name, tensor in tensors.items() if tensor.dtype not in FLOATS]
    if whole:
        kinds = ", ".join(sorted({tensors[name].dtype for name in whole}))
        raise ValueError(
            f"{path} has weights of the data type {kinds}, for example {listed([min(whole)])}: "
            "training needs the original ones in float32, bfloat16 or float16"
        )


def _rehearse(
    config: PretrainedConfig, tensors: Mapping[str, StoredTensor], trust_remote_code: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    buffers = {name for name, _ in model.named_buffers()}
    # Leave integer weights out. A parameter without its weight then counts as missing.
    given = {
        name: torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype], device="meta")
        for name, tensor in tensors.items()
        if tensor.dtype in FLOATS or (name in buffers and tensor.dtype in _DTYPES)
    }
    loaded: Any = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=given,
        device_map="meta",
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return loaded


@contextmanager
def quiet() -> Generator[list[logging.LogRecord]]:
    """Capture transformers' log records, and hide its progress bars."""
    logger, bars = get_logger("transformers"), is_progress_bar_enabled()
    handlers, captured = logger.handlers, BufferingHandler(sys.maxsize)
    logger.handlers = [captured]
    disable_progress_bar()
    try:
        yield captured.buffer
    finally:
        logger.handlers = handlers
        if bars:
            enable_progress_bar()


def _check_class(path: Path, config: PretrainedConfig, model: PreTrainedModel) -> None:
    """Raise ValueError when `architectures`, which engines use, names another class than
    `model_type`."""
    made, named = type(model).__name__, [str(one) for one in config.architectures or ()]
    if made.lower() not in [name.lower() for name in named]:
        raise ValueError(
            f"{path / 'config.json'} names the architectures {named}, but its model_type "
            f"{config.model_type} is a {made}: copy it again from the model"
        )


def _check_report(path: Path, report: Mapping[str, Any]) -> None:
    mismatched = sorted(report["mismatched_keys"])
    faults = {
        "the weights lack": sorted(report["missing_keys"]),
        "the config has no place for": sorted(report["unexpected_keys"]),
        "of another shape than the config's are": [
            f"{name} ({list(found)}, not {list(due)})" for name, found, due in mismatched
        ],
    }
    found = [f"{what} {listed(names)}" for what, names in faults.items() if names]
    if found:
        raise ValueError(
            f"{path / 'config.json'} does not belong to the weights beside it: "
            f"{'; '.join(found)}. Download both again, or write them anew by `save_pretrained`"
        )
