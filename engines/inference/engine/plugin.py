"""Names that vLLM looks for in every process of it; so this imports little."""

import threading
from typing import Any

WEIGHT_TRANSFER_BACKEND = "refrain_host_memory"


def register() -> None:
    """vLLM's entry point `vllm.general_plugins`."""
    keep_locks_private()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND,
            "engines.inference.weights.transfer",
            "HostMemoryWeightTransfer",
        )


def keep_locks_private() -> None:
    """Have progress bars lock between threads alone. By default tqdm makes a lock between
    processes, which is a file in /dev/shm until the process ends by itself: it never does here."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


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
