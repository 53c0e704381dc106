"""refrain as a library. `import refrain` is fast: each name loads its packages on first use.

config = refrain.load_config("infra/demo/train.yaml", ["num_epochs=2"])
summary = await refrain.train(config)     # in a script: asyncio.run(refrain.train(config))
store = refrain.open_run_store("demo")
store.sql("SELECT step, max(max_tokens) FROM lengths GROUP BY step ORDER BY step")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.config_file import load_config
    from flows.library import evaluate, open_run_store, train
    from schemas.config import TrainConfig
    from schemas.evaluation import EvaluateConfig

__all__ = [
    "EvaluateConfig",
    "TrainConfig",
    "evaluate",
    "load_config",
    "open_run_store",
    "train",
]

_HOMES = {
    "EvaluateConfig": "schemas.evaluation",
    "TrainConfig": "schemas.config",
    "evaluate": "flows.library",
    "load_config": "flows.config_file",
    "open_run_store": "flows.library",
    "train": "flows.library",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'refrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
