"""vLLM's start arguments for an engine's configuration."""

from typing import Any

from refrain.engines.inference.engine.graphs import capture_sizes
from refrain.engines.inference.engine.plugin import WEIGHT_TRANSFER_BACKEND
from refrain.engines.inference.engine.trace import trace_args
from refrain.schemas.config import EngineConfig, ModelConfig, RolloutConfig

CPU_KV_CACHE_BYTES = 256 * 2**20
CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on a CPU.

vLLM's default there is 128. A short prompt fills no such block, so it would not enter the prefix
cache and each of its samples would compute it.
"""


def engine_args(config: EngineConfig, index: int, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments for the engine with this index."""
    from vllm.config import WeightTransferConfig

    rollout = config.rollout
    kv_cache_bytes = rollout.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None)
    return {
        "model": str(config.model.path),
        "trust_remote_code": config.model.trust_remote_code,
        # vLLM would fall back to pickle files, which can run code.
        "load_format": "safetensors",
        "dtype": config.model.dtype,
        "hf_overrides": head_overrides(config.model),
        "max_model_len": config.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "tensor_parallel_size": rollout.tp_degree,
        "distributed_executor_backend": "mp" if rollout.tp_degree > 1 else "uni",
        "enforce_eager": rollout.enforce_eager or on_cpu,
        "kv_cache_memory_bytes": kv_cache_bytes,
        **_memory_args(rollout, on_cpu),
        "enable_prefix_caching": True,
        # A returning turn goes before new conversations, whose blocks would evict its prefix.
        **({"scheduling_policy": "priority"} if config.environment else {}),
        # Turn vLLM's loggers off. The served name tells engines apart in vLLM's metrics.
        "disable_log_stats": True,
        "served_model_name": f"engine-{index}",
        "worker_extension_cls": "refrain.engines.inference.engine.worker.WorkerExtension",
        "scheduler_cls": "refrain.engines.inference.engine.scheduler.make_scheduler",
        "weight_transfer_config": WeightTransferConfig(backend=WEIGHT_TRANSFER_BACKEND),
        "seed": config.seed,
        # The warm-up takes half a minute, for kernels that exact sampling replaces (`gpu.warm`).
        **({} if on_cpu else {"kernel_config": {"enable_jit_warmup": False}}),
        **_speculation_args(config),
        **(drafting_graphs(config) if config.speculates and not on_cpu else {}),
        **(_recording_worker(config) if config.record_experts and not on_cpu else {}),
        **_kv_args(config),
        **trace_args(config.trace),
        **({"enable_sleep_mode": True} if not on_cpu and leaves_gpus(config) else {}),
    }


def leaves_gpus(config: EngineConfig) -> bool:
    """Return whether an engine must leave its GPUs at times."""
    return config.pooled or config.takes_turns


def _memory_args(rollout: RolloutConfig, on_cpu: bool) -> dict[str, Any]:
    if on_cpu:
        return {"block_size": CPU_BLOCK_TOKENS}
    return {"gpu_memory_utilization": rollout.gpu_memory_utilization}


def _speculation_args(config: EngineConfig) -> dict[str, Any]:
    if not config.speculates:
        return {}
    if config.rollout.model_runner == "v2":
        # `device_drafter` replaces it. vLLM schedules asynchronously with this method.
        method = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    else:
        method = {
            "method": "custom_class",
            "model": "refrain.engines.inference.engine.plugin.NoDrafts",
        }
    return {
        "speculative_config": {**method, "num_speculative_tokens": config.max_draft},
        "per_request_spec_decode_metrics": "detailed",
    }


def head_overrides(model: ModelConfig) -> dict[str, str]:
    """Return overrides of the model's configuration for the data type of its output layer."""
    return {} if model.head_dtype == "model" else {"head_dtype": model.head_dtype}


def drafting_graphs(config: EngineConfig) -> dict[str, Any]:
    """Return arguments that let CUDA graphs serve an engine that drafts (`graphs`).

    They have no effect if vLLM captures no graphs.
    """
    sizes = capture_sizes(config.rollout.max_num_seqs, config.rollout.max_num_batched_tokens)
    return {
        "worker_cls": "refrain.engines.inference.engine.gpu_worker.DraftingWorker",
        "cudagraph_capture_sizes": sizes,
    }


def _recording_worker(config: EngineConfig) -> dict[str, str]:
    kind = "RecordingDraftingWorker" if config.speculates else "RecordingWorker"
    return {"worker_cls": f"refrain.engines.inference.engine.gpu_worker.{kind}"}


def _kv_args(config: EngineConfig) -> dict[str, Any]:
    if not config.moves_kv:
        return {}
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="KVConnector",
        kv_connector_module_path="refrain.engines.inference.kv.connector",
        kv_role="kv_consumer",
        kv_load_failure_policy="recompute",
    )
    return {"kv_transfer_config": connector}
