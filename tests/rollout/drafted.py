"""vLLM with n-gram drafts and exact sampling, for a process of its own: vLLM's CPU start looks
through every module that is loaded, and fails over some that other tests load."""

import os
from collections.abc import Sequence

from schemas.config import EngineConfig
from schemas.rollout import RolloutRequest


def generate(
    config: EngineConfig, requests: Sequence[RolloutRequest]
) -> tuple[list[tuple[list[int], list[float]]], dict[str, int]]:
    """(tokens, log-probabilities) of each response, and vLLM's counters."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.v1.metrics.reader import Counter

    llm = LLM(
        str(config.model.path),
        dtype="float32",
        max_model_len=config.max_model_len + 8,
        enforce_eager=True,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        worker_extension_cls="engines.rollout.worker.WorkerExtension",
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    )
    llm.collective_rpc("install_exact_sampling")
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=request.max_response_tokens,
            logprobs=0,
            detokenize=False,
            extra_args={"sample_key": request.sample_key},
        )
        for request in requests
    ]
    inputs = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
    outputs = [output.outputs[0] for output in llm.generate(inputs, params, use_tqdm=False)]
    responses = [
        (
            list(output.token_ids),
            [at[t].logprob for at, t in zip(output.logprobs, output.token_ids, strict=True)],
        )
        for output in outputs
    ]
    return responses, {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)}
