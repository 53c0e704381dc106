"""Parts of vLLM's V2 runner that engines use, and of what comes with it. Tables for
`test_contract.py`."""

from tests.inference.vllm_source import SCHEDULER

GPU = "v1/worker/gpu"
RUNNER = f"{GPU}/model_runner.py:GPUModelRunner"
STATES = f"{GPU}/states.py:RequestState"
TABLES = f"{GPU}/block_table.py:BlockTables"
SAMPLER = f"{GPU}/sample/sampler.py:Sampler"
SAMPLING = f"{GPU}/sample/states.py:SamplingStates"
REJECTION = f"{GPU}/spec_decode/rejection_sampler.py"
BUFFERS = f"{GPU}/buffer_utils.py"
INPUTS = f"{GPU}/input_batch.py"
ATTRIBUTES = {
    RUNNER: {
        "sampler",
        "rejection_sampler",
        "speculator",
        "req_states",
        "block_tables",
        "kv_caches",
        "decode_query_len",
        "num_speculative_steps",
        "model_config",
        "parallel_config",
        "device",
    },
    "v1/worker/gpu_worker.py:Worker": {"model_runner", "use_v2_model_runner"},
    "config/vllm.py:VllmConfig": {"use_v2_model_runner", "num_speculative_tokens"},
    STATES: {
        "req_id_to_index",
        "all_token_ids",
        "draft_tokens",
        "total_len",
        "prefill_len",
        "num_computed_tokens",
    },
    TABLES: {"block_tables", "num_blocks"},
    f"{BUFFERS}:UvaBackedTensor": {"np", "gpu"},
    f"{BUFFERS}:StagedWriteTensor": {"gpu"},
    SAMPLER: {"sampling_states", "req_states", "needs_logits_processing"},
    SAMPLING: {"temperature"},
    f"{INPUTS}:InputBatch": {
        "num_reqs",
        "idx_mapping",
        "idx_mapping_np",
        "expanded_idx_mapping",
        "expanded_local_pos",
        "num_draft_tokens_per_req",
        "seq_lens",
        "input_ids",
        "positions",
        "logits_indices",
        "cu_num_logits",
        "query_start_loc",
    },
    f"{GPU}/sample/output.py:SamplerOutput": {
        "sampled_token_ids",
        "logprobs_tensors",
        "num_nans",
        "num_sampled",
        "num_rejected",
        "sampling_mask_tensors",
    },
    "v1/outputs.py:LogprobsTensors": {
        "logprob_token_ids",
        "logprobs",
        "selected_token_ranks",
        "cu_num_generated_tokens",
    },
    "v1/core/sched/output.py:SchedulerOutput": {
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "has_sync_kv_loads",
    },
    "v1/engine/core.py:EngineCore": {"scheduler"},
    SCHEDULER: {"requests", "running", "connector", "kv_cache_manager", "vllm_config"},
    "v1/request.py:Request": {
        "request_id",
        "num_prompt_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "spec_token_ids",
        "sampling_params",
        "max_tokens",
        "is_prefill_chunk",
    },
    "config/scheduler.py:SchedulerConfig": {
        "async_scheduling",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
    },
    "config/model.py:ModelConfig": {"max_model_len"},
}
FUNCTIONS = {
    RUNNER: {
        "get_model": ["self"],
        "initialize_kv_cache": ["self", "kv_cache_config"],
        "finish_requests": ["self", "scheduler_output"],
        "add_requests": ["self", "scheduler_output"],
        "update_requests": ["self", "scheduler_output"],
    },
    STATES: {"remove_request": ["self", "req_id"]},
    "v1/request.py:Request": {"num_tokens": ["self"], "num_output_tokens": ["self"]},
    "distributed/parallel_state.py:GroupCoordinator": {"broadcast": ["self", "input_", "src"]},
    SAMPLER: {
        "add_request": ["self", "req_idx", "sampling_params"],
        "apply_staged_writes": ["self"],
        "__call__": ["self", "logits", "input_batch"],
    },
    SAMPLING: {"get_top_k_top_p": ["self", "expanded_idx_mapping", "idx_mapping_np"]},
    f"{REJECTION}:RejectionSampler": {
        "__call__": ["self", "logits", "input_batch", "draft_logits", "invalid_drafts"]
    },
    f"{BUFFERS}:UvaBackedTensor": {
        "__init__": ["self", "size", "dtype"],
        "copy_to_uva": ["self"],
    },
    f"{GPU}/spec_decode/speculator.py:BaseSpeculator": {
        "propose": [
            *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states"),
            *("aux_hidden_states", "num_sampled", "num_rejected"),
        ],
        "init_cudagraph_manager": ["self", "cudagraph_mode"],
        "capture": ["self"],
    },
    SCHEDULER: {
        "_handle_invalid_blocks": ["self", "invalid_block_ids", "num_scheduled_tokens"],
        "_preempt_request": ["self", "request", "timestamp", "drop_stale_output"],
    },
    "v1/core/kv_cache_manager.py:KVCacheManager": {
        "get_block_ids": ["self", "request_id"],
        "evict_blocks": ["self", "block_ids"],
    },
    "v1/engine/core_client.py:AsyncMPClient": {"call_utility_async": ["self", "method"]},
}
NAMES = {
    INPUTS: {"InputBatch", "get_num_sampled_and_rejected"},
    REJECTION: {"RejectionSampler", "gather_draft_sampled"},
    BUFFERS: {"UvaBackedTensor"},
    f"{GPU}/sample/output.py": {"SamplerOutput"},
    "v1/core/sched/async_scheduler.py": {"AsyncScheduler"},
    "utils/torch_utils.py": {"async_tensor_h2d"},
    "distributed/parallel_state.py": {"get_tp_group"},
}
