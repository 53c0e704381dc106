"""refrain demo: train the shipped model, in any directory."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from refrain.flows.config_file import load_config

CONFIG = Path("infra/demo/train.yaml")
FILES = (CONFIG.parent, Path("infra/presets"), Path("prefect.yaml"))
"""What an empty directory needs for the demo, for example configs, and for the forms of
`refrain ui`."""
_SHIPPED = Path(__file__).parents[1]


def launch_demo(overrides: Sequence[str]) -> None:
    """Copy what is missing of `FILES` to the working directory, and train. Raise ValueError for bad
    overrides before anything is copied."""
    from refrain.flows.launch import launch_train
    from refrain.flows.prepare import training_plan

    if not CONFIG.exists():
        demo = _SHIPPED / CONFIG.parent
        data = [f"data.{name}=[{demo / 'data' / name}.parquet]" for name in ("train", "validation")]
        shipped = [f"model.path={demo / 'model'}", *data, *overrides]
        training_plan(load_config(_SHIPPED / CONFIG, shipped), False, overwrite=True)
    for name in FILES:
        copy_shipped(name, Path())
    launch_train(CONFIG, overrides, resume=None, overwrite=True, check=False)


def copy_shipped(name: Path, directory: Path) -> None:
    """Copy a shipped file or folder to a directory, unless it is there."""
    source, target = _SHIPPED / name, directory / name
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    else:
        shutil.copy(source, target)
    print(f"copied {name}")
