"""A small model that drafts for the requests of rollout engines, ahead of their verification.

Runs as a Ray actor (`drafters.py`). A request's drafts come window by window, each a vLLM request
of its own after the text so far, which the prefix cache makes cheap: going back is forgetting. It
draws with the noise of the request it drafts for (`engines.inference.sampling.noise`), so that a
drafter close to the policy is accepted more often than by samples of its own.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import ray.util
import zmq
import zmq.asyncio

from engines.inference.drafting.draft_link import Feedback, decode_feedback, encode
from engines.inference.engine.process import generate, prepare_process
from engines.specactor.streams import DraftStream
from schemas.counts import StreamCounts
from schemas.drafting import DrafterConfig

# vLLM's blocks of 128 tokens on a CPU leave much of a short text to be computed again.
_CPU_ARGS = {"block_size": 32, "kv_cache_memory_bytes": 64 * 2**20}
_OTHER_NOISE = 0x5DEECE66D
"""Mixed into the sample key where noise is not shared."""


class VLLMDrafter:
    """Server of streams of draft tokens, until it is shut down."""

    def __init__(self, config: DrafterConfig, alone: bool) -> None:
        """A drafter, not started yet. `alone`: there is no other machine to listen to."""
        self._config = config
        self._host = "127.0.0.1" if alone else ray.util.get_node_ip_address()
        self._streams: dict[tuple[bytes, str], DraftStream] = {}
        """Streams by verifier and request."""
        self._drafting: dict[tuple[bytes, str], asyncio.Task] = {}
        self._counts = StreamCounts()
        self._num_drafts = 0
        self._failure: BaseException | None = None

    async def start(self) -> str:
        """Returns the address that it serves."""
        on_cpu = prepare_process(tp_degree=1)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_args(on_cpu)))
        await self._llm.collective_rpc("install_exact_sampling")
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A restarted engine comes back under its old name.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        port = self._socket.bind_to_random_port(f"tcp://{self._host}")
        self._server = self._task(self._serve())
        return f"tcp://{self._host}:{port}"

    async def take_counts(self) -> StreamCounts:
        """Counts since the last call. Raises what has gone wrong while nobody asked."""
        if self._failure is not None:
            raise RuntimeError(f"drafter {self._config.name} failed") from self._failure
        counts, self._counts = self._counts, StreamCounts()
        for stream in self._streams.values():
            stream.counts = self._counts
        return counts

    async def shutdown(self) -> None:
        self._server.cancel()
        self._llm.shutdown()
        self._socket.close()

    async def _serve(self) -> None:
        while True:
            verifier, message = await self._socket.recv_multipart()
            if feedback := decode_feedback(message):
                self._hear(verifier, feedback)

    def _hear(self, verifier: bytes, feedback: Feedback) -> None:
        if feedback.fresh:
            self._close([id for id in self._streams if id[0] == verifier])
        self._close([(verifier, id) for id in feedback.closed])
        for opened in feedback.opened:
            self._close([(verifier, opened.id)])
            self._streams[verifier, opened.id] = DraftStream(opened, self._counts)
            self._go_on((verifier, opened.id))
        for told in feedback.verified:
            id = verifier, told.id
            stream = self._streams.get(id)
            if stream is None:
                continue  # This process began after the request did; it is opened anew.
            if not stream.follows(told):
                self._close([id])  # A message was lost: without it this request has no drafts.
                continue
            if stream.verified(told):
                self._drafting.pop(id).cancel()
            self._go_on(id)

    def _close(self, ids: list[tuple[bytes, str]]) -> None:
        for id in ids:
            if stream := self._streams.pop(id, None):
                stream.close()
            if task := self._drafting.pop(id, None):
                task.cancel()

    def _go_on(self, id: tuple[bytes, str]) -> None:
        stream = self._streams[id]
        num_tokens = stream.next_draft
        if num_tokens is not None and id not in self._drafting:
            self._drafting[id] = self._task(self._draft(id, stream, num_tokens))

    async def _draft(self, id: tuple[bytes, str], stream: DraftStream, num_tokens: int) -> None:
        context = stream.begin(num_tokens)
        token_ids, ended = [], stream.ended
        if num_tokens:
            output = await self._generate(stream.opened.sample_key, context, num_tokens)
            token_ids, ended = list(output.token_ids), output.finish_reason == "stop"
        drafted = stream.drafted(token_ids, ended)
        del self._drafting[id]
        await self._socket.send_multipart([id[0], encode(drafted)])
        if self._streams.get(id) is stream:
            self._go_on(id)

    async def _generate(self, sample_key: int, context: list[int], num_tokens: int) -> Any:
        self._num_drafts += 1
        params, name = self._params(sample_key, num_tokens), f"draft-{self._num_drafts}"
        return (await generate(self._llm, name, context, **params)).outputs[0]

    def _params(self, sample_key: int, num_tokens: int) -> dict[str, Any]:
        """vLLM's `SamplingParams` of one draft."""
        config = self._config
        return {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "max_tokens": num_tokens,
            "extra_args": {
                "sample_key": sample_key if config.shared_noise else sample_key ^ _OTHER_NOISE
            },
        }

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        config = self._config
        return {
            "model": str(config.path),
            "dtype": config.dtype,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "enforce_eager": config.enforce_eager or on_cpu,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "worker_extension_cls": "engines.inference.engine.worker.WorkerExtension",
            **(_CPU_ARGS if on_cpu else {"gpu_memory_utilization": config.gpu_memory_share}),
        }

    def _task(self, work: Coroutine) -> asyncio.Task:
        """A task whose failure is told to whoever asks next."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
