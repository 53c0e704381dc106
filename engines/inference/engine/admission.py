"""Submit requests to vLLM (0.32) in batches, without a task, thread or deep copy per request.

The engine core starts a batch when all its requests have arrived (`arrivals`).
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any
from uuid import uuid4

from refrain.engines.inference.engine.arrivals import BATCH
from refrain.engines.inference.engine.extra_args import DRAFTING, PROMPT_KEY, SAMPLE_KEY, TURN_START
from refrain.engines.inference.engine.process import final_params
from refrain.engines.inference.engine.running import Running
from refrain.engines.inference.engine.stopping import STOP
from refrain.engines.inference.kv.saving import KVSource
from refrain.schemas.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request to vLLM. It replaces vLLM's own collector of outputs."""

    name: str
    token_ids: list[int]
    """Tokens of the prompt, and those generated on other engines."""
    params: dict[str, Any]
    """Fields of vLLM's `SamplingParams`."""
    priority: int
    """vLLM starts waiting requests with a smaller number first, and preempts them last. It ignores
    the number without an environment (`arguments.engine_args`)."""
    put: Callable[[Any], None]
    """Callback for the final `RequestOutput`, or for the error that ended the request."""


def admitted(
    running: Running,
    config: EngineConfig,
    put: Callable[[Any], None],
    max_tokens: int | None = None,
) -> Admitted:
    """Return the vLLM request for an engine of this configuration. `max_tokens`: tokens that it
    may sample. None: up to the end of the response."""
    request = running.request
    sampling = config.rollout.sampling(request.id.split)
    kv = _kv_source(running) if config.moves_kv else None
    stop = config.rollout.stop
    extra_args = {
        SAMPLE_KEY: request.sample_key,
        PROMPT_KEY: request.id.prompt_key,
        DRAFTING: astuple(request.drafting) if request.drafting else None,
        "kv": astuple(kv) if kv else None,
        TURN_START: running.turn_starts_at if running.in_later_turn else 0,
        STOP: (running.turn_starts_at, *stop) if stop else None,
    }
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": max_tokens or request.max_response_tokens - running.num_before,
        "logprobs": 0,
        "flat_logprobs": True,
        "extra_args": extra_args,
    }
    token_ids = [*request.prompt_token_ids, *running.tokens_before]
    return Admitted(str(request.id), token_ids, params, running.arrival, put)


async def admit(llm: Any, requests: Sequence[Admitted]) -> None:
    """Submit requests to vLLM's `AsyncLLM`.

    You may abort a request as soon as this coroutine first waits: vLLM's front end knows it then.
    """
    batch = (uuid4().hex, len(requests))
    core_requests = [_core_request(llm, request, batch) for request in requests]
    for core_request, request in zip(core_requests, requests, strict=True):
        llm.output_processor.add_request(core_request, None, None, 0, request)
    for core_request in core_requests:
        await llm.engine_core.add_request_async(core_request)
    # A request may have been aborted before it reached the core. Abort it there again.
    known = llm.output_processor.request_states
    gone = [request.request_id for request in core_requests if request.request_id not in known]
    await llm.engine_core.abort_requests_async(gone)


def _core_request(llm: Any, request: Admitted, batch: tuple[str, int]) -> Any:
    """Return the checked request for the engine core. vLLM adds random characters to its name."""
    from vllm.inputs import tokens_input

    extra_args = request.params["extra_args"] | {BATCH: batch}
    params = final_params(**request.params | {"extra_args": extra_args})
    prompt = tokens_input(request.token_ids)
    core_request = llm.input_processor.process_inputs(
        request.name, prompt, params, ("generate",), priority=request.priority
    )
    llm.input_processor.assign_request_id(core_request)
    return core_request


def _kv_source(running: Running) -> KVSource | None:
    if (kv := running.request.kv) is None:
        return None
    return KVSource(*astuple(kv), str(running.request.id), running.policy_version)
