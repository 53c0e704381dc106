"""vLLM's entry points into refrain. Every vLLM process imports this, so it imports little."""

import gc
import os
from pathlib import Path
from typing import Any

from refrain.engines.shared_memory import name_after

WEIGHT_TRANSFER_BACKEND = "refrain"
PRIVATE_DIR = "REFRAIN_PRIVATE_DIR"
"""Environment variable with an engine's private directory, deleted when the engine ends."""


def register() -> None:
    """Set up a vLLM process. vLLM calls this through the entry point `vllm.general_plugins`."""
    # vLLM's start allocates many objects. Without this, each garbage collection during the start
    # would scan all modules imported so far.
    gc.freeze()
    own_shared_memory()
    _own_cpu_segments()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND,
            "refrain.engines.inference.weights.transfer",
            "PolicyWeightTransfer",
        )


def own_shared_memory() -> None:
    """Name this process's shared memory and semaphores after the engine's private directory.

    The engine is killed in the end, and they would stay behind otherwise. Progress bars use
    semaphores too.
    """
    if directory := os.environ.get(PRIVATE_DIR):
        name_after(Path(directory))


def _own_cpu_segments() -> None:
    """Do the same for the shared memory through which CPU ranks exchange tensors (made in C++)."""
    if not (directory := os.environ.get(PRIVATE_DIR)):
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    owner, made = Path(directory).name, _CPUSHMDistributed.make_group_name
    named = staticmethod(lambda communicator: f"{owner}-{made(communicator)}")
    _CPUSHMDistributed.make_group_name = named  # ty: ignore[invalid-assignment]


class NoDrafts:
    """Placeholder speculator (method `custom_class`) that drafts nothing.

    Once vLLM has started, `Proposer` replaces it on the first rank, whose drafts vLLM sends to all
    ranks. `Proposer` cannot be imported earlier: it needs numba, and vLLM's start on a CPU scans
    all loaded modules and fails on some of numba's.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Accept the argument that vLLM passes, and load no draft model."""

    def load_model(self, model: Any) -> None:
        """Do nothing: there is no draft model."""

    def propose(self, sampled_token_ids: list, *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]
