"""refrain as a library. `import refrain` is fast: each name loads its packages on first use.

config = refrain.load_config("infra/demo/train.yaml", ["num_epochs=2"])
summary = await refrain.train(config)     # in a script: asyncio.run(refrain.train(config))
store = refrain.open_run_store("demo")
store.sql("SELECT step, max(max_tokens) FROM lengths GROUP BY step ORDER BY step")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refrain.flows.config_file import load_config
    from refrain.flows.library import evaluate, open_run_store, train
    from refrain.schemas.config import TrainConfig
    from refrain.schemas.evaluation import EvaluateConfig

__all__ = [
    "EvaluateConfig",
    "TrainConfig",
    "evaluate",
    "load_config",
    "open_run_store",
    "train",
]

_HOMES = {
    "EvaluateConfig": "refrain.schemas.evaluation",
    "TrainConfig": "refrain.schemas.config",
    "evaluate": "refrain.flows.library",
    "load_config": "refrain.flows.config_file",
    "open_run_store": "refrain.flows.library",
    "train": "refrain.flows.library",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'refrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
