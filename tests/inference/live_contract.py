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
        "_inflight_prefills",
        "max_num_scheduled_tokens",
        "max_model_len",
        "current_step",
        "finished_req_ids",
    },
    "v1/core/kv_cache_manager.py:KVCacheManager": {"coordinator", "block_pool"},
    "v1/core/kv_cache_coordinator.py:KVCacheCoordinator": {"single_type_managers"},
    "v1/core/single_type_kv_cache_manager.py:SingleTypeKVCacheManager": {"block_size"},
    "v1/core/sched/output.py:CachedRequestData": {
        "req_ids",
        "resumed_req_ids",
        "new_token_ids",
        "all_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    },
    "v1/core/sched/output.py:SchedulerOutput": {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "scheduled_encoder_inputs",
        "finished_req_ids",
        "free_encoder_mm_hashes",
        "new_block_ids_to_zero",
    },
    "v1/outputs.py:ModelRunnerOutput": {"sampled_token_ids", "req_id_to_index"},
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
        "schedule": ["self", "throttle_prefills"],
        "update_from_output": ["self", "scheduler_output", "model_runner_output"],
        "get_request_counts": ["self"],
        "_get_new_block_ids_to_zero": ["self"],
    },
    "v1/core/kv_cache_manager.py:KVCacheManager": {
        "allocate_slots": ["self", "request", "num_new_tokens"],
        "get_block_ids": ["self", "request_id"],
    },
    "v1/core/kv_cache_manager.py:KVCacheBlocks": {"get_block_ids": ["self", "allow_none"]},
    "v1/core/block_pool.py:BlockPool": {"get_num_free_blocks": ["self"]},
    "v1/core/kv_cache_coordinator.py:KVCacheCoordinator": {
        "cache_blocks": ["self", "request", "num_computed_tokens"]
    },
    BATCH: {"add_request": ["self", "request"]},
}
NAMES = {
    "v1/executor/abstract.py": {"Executor"},
    "v1/request.py": {"RequestStatus"},
}
