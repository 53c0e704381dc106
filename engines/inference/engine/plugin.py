"""vLLM's entry point `vllm.general_plugins`: called in every vLLM process, so it imports little."""

WEIGHT_TRANSFER_BACKEND = "refrain_host_memory"


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND,
            "engines.inference.weights.transfer",
            "HostMemoryWeightTransfer",
        )
