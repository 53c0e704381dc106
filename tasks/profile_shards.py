"""Shards of a model. A profile measures one of them on one GPU, instead of engines with TP."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from refrain.engines.durable import write_durably
from refrain.engines.latency.shards import shard_config, whole_latency, with_all_reduces
from refrain.schemas.latency import ProfilePoint
from refrain.schemas.profile import ProfileConfig


def check_shards(config: ProfileConfig) -> None:
    """Raise ValueError for a model without shards, or for unknown hardware."""
    if config.shards:
        whole_latency(_model_config(config), config.shards)
        _shards(config)


def write_shards(config: ProfileConfig) -> None:
    """Write the shards' model directories (without weights) into the profile's directory."""
    for tp_degree, shard in _shards(config).items():
        directory = _shard_dir(config, tp_degree)
        directory.mkdir(parents=True, exist_ok=True)
        for file in config.model.glob("tokenizer*"):
            shutil.copy(file, directory)
        write_durably(directory / "config.json", json.dumps(shard, indent=1))


def measured_by(config: ProfileConfig, tp_degree: int) -> tuple[Path, int]:
    """Return the model directory and the TP degree of the engines that measure `tp_degree`."""
    if config.shards and tp_degree > 1:
        return _shard_dir(config, tp_degree), 1
    return config.model, tp_degree


def of_all_ranks(config: ProfileConfig) -> Callable[[ProfilePoint], ProfilePoint]:
    """Return a function that turns a shard's measured point into the point of all TP ranks, by
    adding the all-reduces. Without shards, points stay unchanged."""
    if not config.shards:
        return lambda point: point
    return partial(with_all_reduces, latency=whole_latency(_model_config(config), config.shards))


def _shards(config: ProfileConfig) -> dict[int, dict[str, Any]]:
    degrees = [tp_degree for tp_degree in config.tp_degrees if config.shards and tp_degree > 1]
    return {tp_degree: shard_config(_model_config(config), tp_degree) for tp_degree in degrees}


def _shard_dir(config: ProfileConfig, tp_degree: int) -> Path:
    return config.run_dir / "shards" / f"tp{tp_degree}"


def _model_config(config: ProfileConfig) -> dict[str, Any]:
    return json.loads((config.model / "config.json").read_text())
