"""Names that vLLM looks for in every process of it; so this imports little."""

import gc
import os
from pathlib import Path
from typing import Any

from engines.shared_memory import name_after

WEIGHT_TRANSFER_BACKEND = "refrain"
PRIVATE_DIR = "REFRAIN_PRIVATE_DIR"
"""Environment variable of an engine's processes: the directory that goes when the engine does."""


def register() -> None:
    """vLLM's entry point `vllm.general_plugins`."""
    # Its start makes much more, and what is imported by now would be looked through each time.
    gc.freeze()
    own_shared_memory()
    _own_cpu_segments()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND,
            "engines.inference.weights.transfer",
            "PolicyWeightTransfer",
        )


def own_shared_memory() -> None:
    """Have this process's segments and semaphores, those of progress bars too, go with the engine:
    it is killed in the end, and they would stay."""
    if directory := os.environ.get(PRIVATE_DIR):
        name_after(Path(directory))


def _own_cpu_segments() -> None:
    """The same for segments in which ranks on CPUs exchange tensors, which are made in C++."""
    if not (directory := os.environ.get(PRIVATE_DIR)):
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    owner, made = Path(directory).name, _CPUSHMDistributed.make_group_name
    named = staticmethod(lambda communicator: f"{owner}-{made(communicator)}")
    _CPUSHMDistributed.make_group_name = named  # ty: ignore[invalid-assignment]


class NoDrafts:
    """Speculator of method `custom_class` that drafts nothing. On the first rank, whose drafts vLLM
    hands to all, `Proposer` takes its place once vLLM is up: vLLM's CPU start looks through every
    module that is loaded, and fails over some of numba's."""

    def __init__(self, vllm_config: Any) -> None:
        """Without a draft model, as vLLM constructs it."""

    def load_model(self, model: Any) -> None:
        """Load nothing: there is no draft model here."""

    def propose(self, sampled_token_ids: list, *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]
