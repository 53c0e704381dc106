"""Configured paths become absolute, so that they mean the same in every process."""

from pathlib import Path

from refrain.schemas.base import with_absolute_paths
from refrain.schemas.config import TrainConfig


def test_relative_paths_begin_at_the_given_directory():
    values = {"model": {"path": "m"}, "data": {"train": ["d", "/data/e"]}, "runs_dir": "runs"}
    config = TrainConfig.model_validate(values)
    there = with_absolute_paths(config, Path("/there"))
    assert (there.model.path, there.runs_dir) == (Path("/there/m"), Path("/there/runs"))
    assert there.data.train == (Path("/there/d"), Path("/data/e"))
    assert with_absolute_paths(config).model.path == Path.cwd() / "m"
