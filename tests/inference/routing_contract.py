"""Parts of vLLM that the recording of experts uses, beyond those that engines use. Tables for
`test_contract.py`."""

from tests.inference.vllm_source import BATCH, RUNNER, SCHEDULER

ROUTER = "model_executor/layers/fused_moe/router/base_router.py:BaseRouter"
MIXTURE = "model_executor/layers/fused_moe/runner/moe_runner.py:MoERunner"
AUXILIARY = "distributed/aux_output_connector/connector.py"
ATTRIBUTES = {
    ROUTER: {"top_k", "global_num_experts", "capture_fn"},
    MIXTURE: {"router", "routed_experts"},
    f"{AUXILIARY}:AuxRequestOutput": {"token_start", "rows"},
    RUNNER: {"model", "max_num_tokens", "device", "kv_cache_config", "requests", "input_batch"},
    BATCH: {"req_ids", "num_reqs", "num_computed_tokens_cpu", "block_table"},
    "v1/worker/block_table.py:BlockTable": {"block_table", "block_size"},
    "v1/kv_cache_interface.py:KVCacheConfig": {"num_blocks", "kv_cache_groups"},
    "v1/core/sched/output.py:SchedulerOutput": {
        "kv_connector_metadata",
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
    },
    "v1/core/sched/output.py:CachedRequestData": {"req_ids", "num_output_tokens"},
    "v1/outputs.py:ModelRunnerOutput": {"req_ids", "aux_output_connector_output"},
    "v1/worker/gpu_model_runner.py:AsyncGPUModelRunnerOutput": {"_model_runner_output"},
    SCHEDULER: {"aux_output_connector"},
    "v1/engine/__init__.py:EngineCoreOutput": {"routed_experts"},
    "v1/engine/output_processor.py:RequestState": {"routed_experts_chunks"},
    "outputs.py:CompletionOutput": {"routed_experts"},
}
FUNCTIONS = {
    ROUTER: {"set_capture_fn": ["self", "capture_fn"]},
    RUNNER: {
        "execute_model": ["self", "scheduler_output"],
        "sample_tokens": ["self", "grammar_output"],
    },
    "v1/worker/gpu_worker.py:Worker": {"load_model": ["self"]},
    f"{AUXILIARY}:AuxOutputSchedulerConnector": {
        "take_output": ["self", "request", "output"],
        "build_connector_meta": ["self", "scheduler_output", "requests"],
        "request_finished": ["self", "request"],
        "reset": ["self"],
    },
}
NAMES = {
    AUXILIARY: {"AuxRequestOutput"},
    "v1/kv_cache_interface.py": {"FullAttentionSpec"},
}
