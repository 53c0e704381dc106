"""Configs from YAML files with dotted overrides, and errors that say how to mend them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from schemas.config import TrainConfig

Config = TypeVar("Config", bound=BaseModel)


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a run's config.

    Args:
        path: YAML (or JSON) file.
        overrides: `dotted.name=value`, as in `trainer.learning_rate=1e-6`.

    Raises:
        ValueError: no such file, not YAML, an override without `=`, or a value that is refused.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise ValueError(f"no config file at {path}: give the path of a YAML file")
    for override in overrides:
        if "=" not in override:
            raise ValueError(
                f"override {override!r} has no '=': write dotted.name=value, "
                "for example trainer.learning_rate=1e-6"
            )
    try:
        loaded = OmegaConf.load(path)
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(merged, resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from error
    return validate_config(values, str(path), TrainConfig)


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
