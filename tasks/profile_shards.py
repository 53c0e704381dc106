"""Shards that a profile measures in place of engines of a TP degree."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engines.durable import write_durably
from engines.latency.shards import shard_config, whole_latency, with_all_reduces
from schemas.latency import ProfilePoint
from schemas.profile import ProfileConfig


def check_shards(config: ProfileConfig) -> None:
    """Raises ValueError for a model or hardware of which there are none."""
    if config.shards:
        whole_latency(_model_config(config), config.shards)
        _shards(config)


def write_shards(config: ProfileConfig) -> None:
    """Model directories without weights, in the profile's own."""
    for tp_degree, shard in _shards(config).items():
        directory = _shard_dir(config, tp_degree)
        directory.mkdir(parents=True, exist_ok=True)
        for file in config.model.glob("tokenizer*"):
            shutil.copy(file, directory)
        write_durably(directory / "config.json", json.dumps(shard, indent=1))


def measured_by(config: ProfileConfig, tp_degree: int) -> tuple[Path, int]:
    """Model directory and TP degree of the engines that this one is measured by."""
    if config.shards and tp_degree > 1:
        return _shard_dir(config, tp_degree), 1
    return config.model, tp_degree


def of_all_ranks(config: ProfileConfig) -> Callable[[ProfilePoint], ProfilePoint]:
    """Makes of a point that was measured that of all ranks of its TP degree."""
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
