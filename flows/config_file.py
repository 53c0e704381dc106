"""Read configs from YAML files with dotted overrides. Errors say how to fix the file."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refrain.engines.user_files import naming, read_text, validated
from refrain.schemas.config import TrainConfig
from refrain.schemas.removed_settings import accept_renamed, current_settings
from refrain.schemas.secret import fill_in, secrets_of
from refrain.tasks.run.config_record import CONFIG_FILE, with_secrets

if TYPE_CHECKING:
    from omegaconf import DictConfig

MAX_VALUES = 100_000
"""Limit on the values of a config file. Each YAML alias counts as the values it stands for."""


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a run's config from a YAML or JSON file and overrides (`trainer.learning_rate=1e-6`).

    Raise ValueError when the file is missing or not YAML, an override has no `=`, or a value is
    refused.
    """
    return validated(read_values(Path(path), overrides), str(path), TrainConfig)


def override(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """Return a config with overrides. Raise ValueError like `load_config`."""
    from omegaconf import OmegaConf

    with naming("overrides"):
        given = accept_renamed(read_values(None, overrides))
    with _reading("overrides"):
        merged = OmegaConf.merge(OmegaConf.create(config.model_dump(mode="json")), given)
    values = OmegaConf.to_container(merged)
    assert isinstance(values, dict)
    named = fill_in({str(name): value for name, value in values.items()}, secrets_of(config))
    return validated(named, " ".join(overrides), TrainConfig)


def read_values(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the plain values of a YAML or JSON file and overrides, or of overrides alone. Raise
    ValueError like `load_config`, but do not validate values."""
    from omegaconf import DictConfig, OmegaConf

    if path and not path.exists():
        raise ValueError(f"no config file at {path}: give the path of a YAML file")
    for override in overrides:
        if "=" not in override:
            raise ValueError(
                f"override {override!r} has no '=': write dotted.name=value, "
                "for example trainer.learning_rate=1e-6"
            )
    text = read_text(path) if path else ""
    with _reading(path or "overrides"):
        _refuse_bomb(text)
        loaded = OmegaConf.load(StringIO(text)) if path else OmegaConf.create()
        if path and path.name == CONFIG_FILE and isinstance(loaded, DictConfig):
            loaded = OmegaConf.create(_current(loaded))
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"{path} has no settings: give a YAML file with `name: value` lines")
    for override in overrides:
        with _reading(f"override {override!r}"):
            _refuse_bomb(override.partition("=")[2])
            loaded.merge_with_dotlist([override])
    with _reading(path or "overrides"):
        values = OmegaConf.to_container(loaded, resolve=True)
    assert isinstance(values, dict)
    named = {str(name): value for name, value in values.items()}
    return with_secrets(path, named) if path else named


def _current(recorded: "DictConfig") -> dict[str, Any]:
    """Return the values of a run's recorded config under their current names."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(recorded)
    assert isinstance(values, dict)
    return current_settings({str(name): value for name, value in values.items()})


def _refuse_bomb(text: str) -> None:
    """Raise ValueError when the text, with its YAML aliases expanded, has too many values."""
    import yaml

    counted: dict[int, int] = {}

    def num_values(node: Any) -> int:
        if id(node) not in counted:
            # A node that contains itself never ends, so count it as too many until it is counted.
            counted[id(node)] = MAX_VALUES
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            inner = (part if isinstance(part, tuple) else (part,) for part in parts)
            counted[id(node)] = 1 + sum(num_values(one) for pair in inner for one in pair)
        return counted[id(node)]

    if num_values(yaml.compose(text, Loader=yaml.SafeLoader)) > MAX_VALUES:
        raise ValueError(
            f"with its aliases (*name) expanded it has more than {MAX_VALUES:,} values: write "
            "each setting once"
        )


@contextmanager
def _reading(source: Path | str) -> Generator[None]:
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        with naming(source):
            yield
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{source} cannot be read as YAML: {error}") from error
