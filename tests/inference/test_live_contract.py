"""Everything of vLLM's that live sequences touch is there and as it was, by its source."""

import pytest

from tests.inference.test_contract import BATCH, RUNNER, SCHEDULER, Source, names_in

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
    "v1/core/kv_cache_manager.py:KVCacheManager": {"coordinator", "block_pool"},
    REQUEST: {
        "request_id",
        "prompt_token_ids",
        "num_prompt_tokens",
        "num_computed_tokens",
        "num_tokens",
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
        "__init__": ["self", "request_id", "prompt_token_ids", "sampling_params", "pooling_params"]
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


@pytest.mark.parametrize("place", ATTRIBUTES)
def test_its_attributes_are_there(place: str) -> None:
    source = Source.of(place)
    assert ATTRIBUTES[place] <= source.attributes | source.functions.keys()


@pytest.mark.parametrize("place", FUNCTIONS)
def test_its_functions_take_what_they_are_given(place: str) -> None:
    functions = Source.of(place).functions
    for name, arguments in FUNCTIONS[place].items():
        assert functions[name][: len(arguments)] == arguments, name


def test_its_names_are_there() -> None:
    assert "Executor" in names_in("v1/executor/abstract.py")
    assert "RequestStatus" in names_in("v1/request.py")
