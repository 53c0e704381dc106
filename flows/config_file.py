"""Configs from YAML files with dotted overrides, and errors that say how to mend them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from schemas.config import TrainConfig

Config = TypeVar("Config", bound=BaseModel)


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """A run's config from a YAML or JSON file and overrides, `trainer.learning_rate=1e-6`. Raises
    ValueError: no such file, not YAML, an override without `=`, or a value that is refused."""
    return validate_config(read_values(path, overrides), str(path), TrainConfig)


def read_values(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Plain values of a YAML or JSON file, or of the overrides alone; raises ValueError as
    `load_config` does, but refuses no value."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if path and not path.is_file():
        raise ValueError(f"no config file at {path}: give the path of a YAML file")
    for override in overrides:
        if "=" not in override:
            raise ValueError(
                f"override {override!r} has no '=': write dotted.name=value, "
                "for example trainer.learning_rate=1e-6"
            )
    try:
        loaded = OmegaConf.load(path) if path else OmegaConf.create()
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(merged, resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no settings: give a YAML file with `name: value` lines")
    return {str(name): value for name, value in values.items()}


def validate_config(values: object, source: str, kind: type[Config]) -> Config:
    """A config from plain values; raises ValueError with a line per value that is refused."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(str(part) for part in problem['loc']) or 'config'}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ValueError(f"{source} is not a valid config:\n" + "\n".join(lines)) from error
