"""vLLM still has everything that engines use of it, on its CPU and GPU classes.

The tests read vLLM's source: importing vLLM takes many seconds.
"""

import ast
from collections.abc import Mapping
from typing import TypeVar

import pytest

from refrain.engines.inference.engine import supported
from refrain.engines.inference.engine.plugin import NoDrafts
from tests.inference import live_contract, routing_contract, scheduler_contract, v2_contract
from tests.inference.vllm_source import (
    BATCH,
    CONNECTOR,
    IPC,
    LLM,
    MODEL,
    RUNNER,
    SCHEDULER,
    TRANSFER,
    Source,
    names_in,
    tree,
)

T = TypeVar("T")

TABLES = live_contract, routing_contract, scheduler_contract, v2_contract
"""Modules with tables like those of this one."""

ATTRIBUTES = {
    RUNNER: {
        "sampler",
        "rejection_sampler",
        "drafter",
        "input_batch",
        "requests",
        "query_start_loc",
        "positions",
        "speculative_config",
        "device",
        "vllm_config",
        "model_config",
        "max_model_len",
        "effective_drafter_max_model_len",
        "num_spec_tokens",
        "uniform_decode_query_len",
        "cudagraph_dispatcher",
    },
    "v1/worker/gpu_worker.py:Worker": {"_weight_update_active"},
    "model_executor/layers/logits_processor.py:LogitsProcessor": {"scale", "soft_cap"},
    "model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbedding": {"shard_indices"},
    "model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbeddingShardIndices": {
        "org_vocab_start_index",
        "org_vocab_end_index",
    },
    f"{IPC}:IPCTrainerInitInfo": {"packed", "packed_buffer_size_bytes"},
    f"{IPC}:IPCWeightTransferUpdateInfo": {"ipc_handles_pickled"},
    "v1/cudagraph_dispatcher.py:CudagraphDispatcher": {"uniform_decode_query_len"},
    BATCH: {
        "req_id_to_index",
        "num_computed_tokens_cpu",
        "num_prompt_tokens",
        "num_tokens_no_spec",
        "token_ids_cpu",
        "sampling_metadata",
    },
    "v1/worker/gpu_input_batch.py:CachedRequestState": {
        "sampling_params",
        "block_ids",
        "num_prompt_tokens",
    },
    LLM: {"output_processor", "input_processor", "engine_core", "vllm_config"},
    "v1/engine/output_processor.py:OutputProcessor": {"request_states"},
    "config/model.py:ModelConfig": {"has_inner_state", "head_dtype", "dtype"},
    "config/kernel.py:KernelConfig": {"enable_jit_warmup"},
    "engine/arg_utils.py:EngineArgs": {
        "model",
        "dtype",
        "hf_overrides",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tensor_parallel_size",
        "distributed_executor_backend",
        "enforce_eager",
        "kernel_config",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "block_size",
        "enable_prefix_caching",
        "scheduling_policy",
        "disable_log_stats",
        "served_model_name",
        "worker_cls",
        "worker_extension_cls",
        "scheduler_cls",
        "weight_transfer_config",
        "seed",
        "speculative_config",
        "per_request_spec_decode_metrics",
        "cudagraph_capture_sizes",
        "kv_transfer_config",
        "enable_sleep_mode",
        "profiler_config",
    },
    "config/profiler.py:ProfilerConfig": {
        "profiler",
        "torch_profiler_dir",
        "torch_profiler_with_stack",
        "torch_profiler_dump_cuda_time_total",
        "ignore_frontend",
        "max_iterations",
    },
    "sampling_params.py:SamplingParams": {"output_kind", "extra_args", "skip_clone"},
    SCHEDULER: {"requests", "vllm_config"},
    "v1/request.py:Request": {"sampling_params", "all_token_ids", "status"},
    "v1/core/sched/output.py:SchedulerOutput": {
        "finished_req_ids",
        "preempted_req_ids",
        "scheduled_cached_reqs",
        "total_num_scheduled_tokens",
    },
    "v1/core/sched/output.py:CachedRequestData": {"resumed_req_ids"},
    "v1/engine/__init__.py:EngineCoreOutput": {
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "finished",
        "prefill_stats",
        "new_prompt_logprobs_tensors",
        "events",
    },
    "v1/engine/__init__.py:EngineCoreOutputs": {
        "outputs",
        "finished_requests",
        "scheduler_stats",
    },
    "v1/sample/metadata.py:SamplingMetadata": {
        "temperature",
        "all_greedy",
        "top_k",
        "top_p",
        "no_penalties",
        "bad_words_token_ids",
    },
    "v1/spec_decode/metadata.py:SpecDecodeMetadata": {
        "draft_token_ids",
        "num_draft_tokens",
        "logits_indices",
        "cu_num_sampled_tokens",
        "max_spec_len",
    },
    "v1/outputs.py:SamplerOutput": {"sampled_token_ids", "logprobs_tensors"},
    "outputs.py:CompletionOutput": {
        "token_ids",
        "logprobs",
        "finish_reason",
        "spec_decode_metrics",
    },
}
FUNCTIONS = {
    RUNNER: {
        "_update_states": ["self", "scheduler_output"],
        "_prepare_inputs": ["self", "scheduler_output", "num_scheduled_tokens"],
        "get_model": ["self"],
        "propose_draft_token_ids": [
            "self",
            "scheduler_output",
            "sampled_token_ids",
            "sampling_metadata",
            "hidden_states",
            "sample_hidden_states",
            "aux_hidden_states",
            "spec_decode_metadata",
        ],
    },
    f"{MODEL}:VllmModel": {"embed_input_ids": ["self", "input_ids"]},
    "model_executor/layers/logits_processor.py:LogitsProcessor": {
        "forward": ["self", "lm_head", "hidden_states", "embedding_bias"]
    },
    f"{MODEL}:VllmModelForTextGeneration": {"compute_logits": ["self", "hidden_states"]},
    "config/model.py:ModelConfig": {"get_vocab_size": ["self"], "get_hidden_size": ["self"]},
    BATCH: {"req_ids": ["self"], "num_reqs": ["self"]},
    LLM: {
        "generate": ["self", "prompt", "sampling_params", "request_id"],
        "collective_rpc": ["self", "method", "timeout", "args", "kwargs"],
        "pause_generation": ["self", "mode", "clear_cache"],
        "resume_generation": ["self"],
        "abort": ["self", "request_id"],
        "reset_prefix_cache": ["self"],
        "init_weight_transfer_engine": ["self"],
        "start_weight_update": ["self"],
        "update_weights": ["self"],
        "finish_weight_update": ["self"],
        "sleep": ["self", "level"],
        "wake_up": ["self", "tags"],
        "release_kv_cache_memory": ["self"],
        "start_profile": ["self", "profile_prefix"],
        "stop_profile": ["self"],
        "shutdown": ["self"],
        "from_engine_args": [
            "cls",
            "engine_args",
            "start_engine_loop",
            "usage_context",
            "stat_loggers",
        ],
    },
    "v1/worker/gpu_worker.py:Worker": {
        "_make_model_runner": ["self"],
        "finish_weight_update": ["self"],
    },
    f"{TRANSFER}:VLLMWeightSyncClient": {
        "init_weight_transfer_engine": ["self", "init_info"],
        "start_weight_update": ["self"],
        "update_weights": ["self", "update_info"],
        "finish_weight_update": ["self", "weight_version"],
    },
    f"{TRANSFER}:WeightSource": {"metadata": ["self"], "__iter__": ["self"]},
    f"{TRANSFER}:WeightTransferEngine": {"parse_update_info": ["self", "update_dict"]},
    f"{IPC}:IPCWeightTransferEngine": {
        "receive_weights": ["self", "update_info"],
        "start_weight_update": ["self"],
        "finish_weight_update": ["self"],
    },
    f"{IPC}:IPCTrainerWeightTransferEngine": {
        "trainer_init": ["cls", "init_info", "client", "source"],
        "send_weights": ["self"],
    },
    "v1/sample/sampler.py:Sampler": {
        "__init__": ["self", "logprobs_mode"],
        "forward": ["self", "logits", "sampling_metadata"],
        "gather_logprobs": ["logprobs", "num_logprobs", "token_ids"],
    },
    "v1/sample/rejection_sampler.py:RejectionSampler": {
        "forward": ["self", "metadata", "draft_probs", "logits", "sampling_metadata"],
    },
    "v1/engine/output_processor.py:OutputProcessor": {
        "add_request": ["self", "request", "prompt", "parent_req", "request_index", "queue"],
    },
    "v1/engine/input_processor.py:InputProcessor": {
        "process_inputs": [
            *("self", "request_id", "prompt", "params", "supported_tasks", "arrival_time"),
            *("lora_request", "tokenization_kwargs", "trace_headers", "priority"),
        ],
        "assign_request_id": ["request"],
    },
    "v1/engine/core_client.py:AsyncMPClient": {
        "add_request_async": ["self", "request"],
        "abort_requests_async": ["self", "request_ids"],
    },
    SCHEDULER: {
        "add_request": ["self", "request"],
        "update_from_output": ["self", "scheduler_output", "model_runner_output"],
        "finish_requests": ["self", "request_ids", "finished_status"],
        "_update_request_with_output": ["self", "request", "new_token_ids", "is_stale"],
    },
    "v1/request.py:Request": {"num_tokens": ["self"]},
    CONNECTOR: {
        "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
        "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
        "build_connector_meta": ["self", "scheduler_output"],
        "register_kv_caches": ["self", "kv_caches"],
        "start_load_kv": ["self", "forward_context"],
    },
}
NAMES = {
    "distributed/kv_transfer/__init__.py": {"get_kv_transfer_group"},
    "distributed/weight_transfer/factory.py": {"WeightTransferEngineFactory"},
    TRANSFER: {
        "WeightTransferInitRequest",
        "WeightTransferUpdateRequest",
        "WeightTransferUpdateInfo",
        "WeightSource",
        "ParamMeta",
    },
    IPC: {"IPCWeightTransferUpdateInfo"},
    "distributed/device_communicators/cpu_communicator.py": {"_CPUSHMDistributed"},
    "v1/sample/ops/topk_topp_sampler.py": {"apply_top_k_top_p"},
    "v1/metrics/ray_wrappers.py": {"RayPrometheusStatLogger", "ray_metrics", "ray_serve"},
    "model_executor/layers/vocab_parallel_embedding.py": {"ParallelLMHead"},
    "model_executor/layers/logits_processor.py": {"LogitsProcessor"},
    "distributed/communication_op.py": {"tensor_model_parallel_all_reduce"},
    "v1/worker/utils.py": {"request_memory"},
    "inputs/__init__.py": {"tokens_input"},
    "sampling_params.py": {"RequestOutputKind"},
    "v1/request.py": {"RequestStatus"},
    "tokenizers/__init__.py": {"cached_tokenizer_from_config"},
}


def of_all(*tables: Mapping[str, T]) -> list[tuple[str, T]]:
    """Return the rows of all tables. A place may be in several."""
    return [row for table in tables for row in table.items()]


@pytest.mark.parametrize(
    ("place", "names"), of_all(ATTRIBUTES, *(other.ATTRIBUTES for other in TABLES))
)
def test_vllm_classes_have_the_used_attributes(place: str, names: set[str]) -> None:
    source = Source.of(place)
    assert names <= source.attributes | source.functions.keys()


@pytest.mark.parametrize(
    ("place", "known"), of_all(FUNCTIONS, *(other.FUNCTIONS for other in TABLES))
)
def test_vllm_functions_take_the_given_arguments(place: str, known: dict[str, list[str]]) -> None:
    functions = Source.of(place).functions
    for name, arguments in known.items():
        assert functions[name][: len(arguments)] == arguments, name


@pytest.mark.parametrize(("file", "names"), of_all(NAMES, *(other.NAMES for other in TABLES)))
def test_vllm_modules_have_the_used_names(file: str, names: set[str]) -> None:
    assert names <= names_in(file)


def test_filtered_reload_warning_is_the_one_vllm_logs() -> None:
    from refrain.engines.inference.weights.transfer import NOTHING_LOADED

    warned = [
        node.args[0].value
        for node in ast.walk(tree("model_executor/model_loader/reload/layerwise.py"))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "logger.warning"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert NOTHING_LOADED in warned


def test_the_runner_of_cpus_is_made_from_that_of_gpus() -> None:
    base, *_ = Source.of("v1/worker/cpu_model_runner.py:CPUModelRunner").node.bases
    assert ast.unparse(base) == "GPUModelRunner"


def test_a_scheduler_of_ones_own_is_made_as_its_class_was() -> None:
    """vLLM calls `Scheduler` with keywords, so a function that chooses the class can replace it.

    The asynchronous scheduler derives from the plain one.
    """
    made = [
        node
        for node in ast.walk(Source.of("v1/engine/core.py:EngineCore").node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Scheduler"
    ]
    (call,) = made
    assert not call.args
    assert "vllm_config" in [keyword.arg for keyword in call.keywords]
    (base,) = Source.of("v1/core/sched/async_scheduler.py:AsyncScheduler").node.bases
    assert ast.unparse(base) == "Scheduler"


def test_tokens_cut_by_the_scheduler_have_no_logprobs() -> None:
    """vLLM takes log-probabilities for the tokens that `_update_request_with_output` returns."""
    update = next(
        node
        for node in ast.walk(Source.of(SCHEDULER).node)
        if isinstance(node, ast.FunctionDef) and node.name == "update_from_output"
    )
    lines = [ast.unparse(node) for node in ast.walk(update) if isinstance(node, ast.Assign)]
    call = "self._update_request_with_output(request, new_token_ids, is_stale=output_is_stale)"
    assert f"new_token_ids, stopped = {call}" in lines
    assert "new_logprobs = logprobs.slice_request(req_index, len(new_token_ids))" in lines


def test_front_end_passes_outputs_to_the_given_queue() -> None:
    """The front end calls only `put` of the queue that it got with the request."""
    uses = [
        ast.unparse(node)
        for name in ("OutputProcessor", "RequestState")
        for node in ast.walk(Source.of(f"v1/engine/output_processor.py:{name}").node)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(".queue")
    ]
    assert {use.rpartition(".")[2] for use in uses} == {"put"}
    assert len(uses) >= 3


def test_logprobs_of_steps_can_be_joined() -> None:
    """We join the fields by position, so their order must stay."""
    lists = Source.of("v1/outputs.py:LogprobsLists").node
    assert [ast.unparse(base) for base in lists.bases] == ["NamedTuple"]
    fields = [node.target.id for node in lists.body if isinstance(node, ast.AnnAssign)]  # ty: ignore
    assert fields == [
        "logprob_token_ids",
        "logprobs",
        "sampled_token_ranks",
        "cu_num_generated_tokens",
    ]


def test_a_speculator_of_ones_own_is_called_as_it_was() -> None:
    """A speculator of method `custom_class` gets the sampled tokens and the batch's arrays."""
    calls = [
        node
        for node in ast.walk(Source.of(RUNNER).node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("drafter).propose")
    ]
    (call,) = calls
    assert [ast.unparse(argument) for argument in call.args] == [
        "sampled_token_ids",
        "self.input_batch.num_tokens_no_spec",
        "self.input_batch.token_ids_cpu",
    ]
    assert [keyword.arg for keyword in call.keywords] == ["slot_mappings"]
    assert NoDrafts(None).propose([[1], [2]], None, None, slot_mappings=None) == [[], []]


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    supported.check_version()
    installed = {"vllm": "0.33.1"}
    monkeypatch.setattr(supported, "installed_version", installed.get)
    with pytest.raises(ValueError, match=r"vLLM 0\.33\.1 is installed, but .* need vLLM 0\.32"):
        supported.check_version()
    installed["vllm"] = "0.320.0"
    with pytest.raises(ValueError, match=r"0\.320\.0"):
        supported.check_version()
    installed.clear()
    with pytest.raises(ValueError, match="not installed"):
        supported.check_version()


@pytest.mark.parametrize("is_v2", [False, True])
def test_another_runner_is_refused(is_v2: bool) -> None:
    with pytest.raises(RuntimeError, match=r"with builtins\.object, but .*GPUModelRunner"):
        supported.check_runner(object(), is_v2)
