"""Simulate a GPU in every process of a run whose PYTHONPATH has this folder.

The machine check finds the GPU and weights can stay on it. Reading a file of weights raises.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3]))

from tests.module_patches import change_when_loaded


def _it_is_there(module: Any) -> None:
    module.require_gpus = lambda: 1


def _work_on_it(_: Any) -> None:
    from tests.stand_in_ipc import stand_in

    stand_in(os.environ["CUDA_VISIBLE_DEVICES"])


def _read_no_file(module: Any) -> None:
    def load(_: Any, path: str) -> None:
        raise RuntimeError(f"{path} was to be read")

    module.PolicyWeightTransfer._load = load


change_when_loaded(
    {
        "refrain.tasks.run.machine": _it_is_there,
        "vllm.distributed.weight_transfer.packed_tensor": _work_on_it,
        "refrain.engines.inference.weights.transfer": _read_no_file,
    }
)
