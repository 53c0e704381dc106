"""Give engines wrong weights after the trainer's first step, in every process of a run whose
PYTHONPATH has this folder. The variable `WRONG_WEIGHTS` picks the error: noise or swap."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3]))

from tests.module_patches import change_when_loaded


def _noise(tensors: dict[str, Any]) -> dict[str, Any]:
    """Add noise of 0.3 standard deviations to each matrix of one layer. Noise of 0.1 would go
    unnoticed: it makes a difference of 0.15 nats, and bfloat16 alone makes 0.08."""
    import torch

    torch.manual_seed(0)
    changed = {
        name: (one.float() + 0.3 * one.float().std() * torch.randn(one.shape)).to(one.dtype)
        for name, one in tensors.items()
        if ".layers.15." in name and one.dim() == 2
    }
    return tensors | changed


def _swap(tensors: dict[str, Any]) -> dict[str, Any]:
    """Swap the keys' matrix with that of the first query heads in one layer."""
    import torch

    q, k = (f"model.layers.15.self_attn.{part}_proj.weight" for part in "qk")
    first, rest = tensors[q].split([len(tensors[k]), len(tensors[q]) - len(tensors[k])])
    return tensors | {q: torch.cat([tensors[k], rest]), k: first.clone()}


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"noise": _noise, "swap": _swap}


def _spoil(module: Any) -> None:
    load = module.PolicyWeightTransfer._load

    def load_others(self: Any, path: str) -> None:
        import safetensors.torch

        with safetensors.safe_open(path, framework="pt") as file:
            version = int(file.metadata()["policy_version"])
        if version == 0:
            load(self, path)
            return
        with tempfile.NamedTemporaryFile() as wrong:
            tensors = KINDS[os.environ["WRONG_WEIGHTS"]](safetensors.torch.load_file(path))
            safetensors.torch.save_file(tensors, wrong.name)
            load(self, wrong.name)

    module.PolicyWeightTransfer._load = load_others


change_when_loaded({"refrain.engines.inference.weights.transfer": _spoil})
