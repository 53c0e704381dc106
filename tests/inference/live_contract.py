"""Parts of vLLM that live sequences use, beyond those that engines use. Tables for
`test_contract.py`."""

from tests.inference.vllm_source import BATCH, RUNNER, SCHEDULER

REQUEST = "v1/request.py:Request"
ATTRIBUTES = {
    "v1/engine/core.py:EngineCore": {
        "model_executor",
        "scheduler",
        "request_block_hasher",
        "step_fn",
        "collective_rpc",
        "reset_prefix_cache",
        "shutdown",
    },
    "v1/executor/uniproc_executor.py:UniProcExecutor": {"driver_worker"},
    SCHEDULER: {
        "requests",
        "running",
        "max_num_running_reqs",
        "hash_block_size",
        "kv_cache_manager",
        "prev_step_scheduled_req_ids",
    },
    "v1/core/kv_cache_manager.py:KVCacheManager": {"coordinator"},
    REQUEST: {
        "request_id",
        "prompt_token_ids",
        "num_prompt_tokens",
        "num_computed_tokens",
        "num_tokens",
        "num_output_tokens",
        "block_hashes",
        "_all_token_ids",
        "_output_token_ids",
        "_block_hasher",
    },
    RUNNER: {"requests", "input_batch", "_model_forward"},
    BATCH: {
        "req_id_to_index",
        "token_ids_cpu",
        "is_token_ids",
        "num_tokens_no_spec",
        "req_output_token_ids",
    },
    "v1/worker/gpu_input_batch.py:CachedRequestState": {
        "req_id",
        "prompt_token_ids",
        "output_token_ids",
        "num_prompt_tokens",
    },
    "engine/arg_utils.py:EngineArgs": {"distributed_executor_backend", "async_scheduling"},
}
FUNCTIONS = {
    "v1/engine/core.py:EngineCore": {
        "__init__": ["self", "vllm_config", "executor_class", "log_stats"]
    },
    REQUEST: {
        "append_output_token_ids": ["self", "token_ids"],
        "__init__": ["self", "request_id", "prompt_token_ids", "sampling_params", "pooling_params"],
    },
    SCHEDULER: {
        "add_request": ["self", "request"],
        "finish_requests": ["self", "request_ids", "finished_status"],
    },
    "v1/core/kv_cache_coordinator.py:KVCacheCoordinator": {
        "cache_blocks": ["self", "request", "num_computed_tokens"]
    },
    BATCH: {"add_request": ["self", "request"]},
}
NAMES = {
    "v1/executor/abstract.py": {"Executor"},
    "v1/request.py": {"RequestStatus"},
}
