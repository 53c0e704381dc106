"""A small draft model that runs ahead of the rollout engines and sends them draft tokens.

It runs as a Ray actor (`drafters.py`). Each request is a live sequence (`live.py`):

    receive verified tokens ─► roll back wrong drafts ─► decode one step ─► send the new tokens

One thread does all this; calls to the actor take turns with it. By default the drafter samples with
the noise of the request that it drafts for (`engines.inference.sampling.noise`). A drafter close to
the policy is then accepted more often than with independent samples.
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray.util
import zmq
from msgspec.structs import replace

from refrain.engines.garbage import freeze_garbage
from refrain.engines.inference.drafting.draft_link import decode_feedback, encode
from refrain.engines.inference.drafting.live import CacheFull, LiveSequences
from refrain.engines.inference.engine.arguments import CPU_BLOCK_TOKENS, CPU_KV_CACHE_BYTES
from refrain.engines.inference.engine.plugin import PRIVATE_DIR
from refrain.engines.inference.engine.process import prepare_process
from refrain.engines.specactor.streams import Drafted, DraftStream, Opened, Verified
from refrain.schemas.counts import StreamCounts
from refrain.schemas.drafting import DRAFTER_MEMORY_SHARE, DrafterConfig

_TURN_S = 0.05
"""Seconds of drafting or waiting, after which a call to the actor gets its turn."""
_CPU_ARGS = {"block_size": CPU_BLOCK_TOKENS, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
_OTHER_NOISE = 0x5DEECE66D
"""Mixed into the sample key if the drafter does not share the request's noise."""

StreamId = tuple[bytes, str]
"""Identity of the verifier, and id of the request."""


class VLLMDrafter:
    """Server that streams draft tokens to engines until it shuts down."""

    def __init__(self, config: DrafterConfig, on_cluster: bool = False) -> None:
        """Describe a drafter; `start` loads it. `on_cluster`: engines may be on other machines."""
        self._config = config
        self._host = ray.util.get_node_ip_address() if on_cluster else None
        """Address of this machine; None if all engines run on it."""
        self._thread = ThreadPoolExecutor(1, "drafting")
        self._streams: dict[StreamId, DraftStream] = {}
        self._names: dict[str, StreamId] = {}
        """Stream id by the name of its sequence, oldest first."""
        self._sequences: dict[StreamId, str] = {}
        self._wanting: set[str] = set()
        """Names of the sequences that need another token."""
        self._num_opened = 0
        self._counts = StreamCounts()
        self._failure: BaseException | None = None

    async def start(self) -> str:
        """Load the model and start to serve. Return the address."""
        with freeze_garbage():
            address = await self._in_thread(self._load)
        self._server = asyncio.create_task(self._serve())
        return address

    async def take_counts(self) -> StreamCounts:
        """Return the counts since the last call. Raise RuntimeError if drafting has failed."""
        if self._failure is not None:
            raise RuntimeError(f"drafter {self._config.name} failed") from self._failure
        return await self._in_thread(self._take_counts)

    async def shutdown(self) -> None:
        self._server.cancel()
        await self._in_thread(self._close)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _serve(self) -> None:
        try:
            while True:
                await self._in_thread(self._turn)
        except Exception as error:  # The next call of `take_counts` raises it.
            self._failure = error

    def _load(self) -> str:
        on_cpu = prepare_process(tp_degree=1)
        self._live = LiveSequences(self._engine_args(on_cpu))
        self._ends = self._live.ending_tokens
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A restarted engine connects again under its old name.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        return self._bind()

    def _bind(self) -> str:
        if self._host:
            at = f"tcp://{self._host}"
            return f"{at}:{self._socket.bind_to_random_port(at)}"
        # A socket in a private directory: other users of this machine must not read drafts, nor
        # request any in an engine's name.
        address = f"ipc://{os.environ[PRIVATE_DIR]}/drafts"
        self._socket.bind(address)
        return address

    def _take_counts(self) -> StreamCounts:
        counts, self._counts = self._counts, StreamCounts()
        for stream in self._streams.values():
            stream.counts = self._counts
        return counts

    def _close(self) -> None:
        self._live.shutdown()
        self._socket.close()

    def _turn(self) -> None:
        ends_s = time.monotonic() + _TURN_S
        while (left_s := ends_s - time.monotonic()) > 0:
            told = self._socket.poll(0 if self._wanting else int(left_s * 1000))
            began_s = time.monotonic()
            if told:
                self._receive(*self._socket.recv_multipart())
            elif self._wanting:
                self._draft()
                self._counts.num_steps += 1
            self._counts.work_s += time.monotonic() - began_s

    def _draft(self) -> None:
        """Decode one token of each wanting sequence and send it to the verifier."""
        drafted: dict[bytes, list[Drafted]] = defaultdict(list)
        try:
            tokens = self._live.go_on(self._wanting)
        except CacheFull:
            self._end([self._names[next(reversed(self._names))]])
            return
        for name, token in tokens.items():
            id = self._names[name]
            stream = self._streams[id]
            if stream.wants:
                drafted[id[0]].append(stream.drafted(token, ended=token in self._ends))
                self._follow(name, stream)
            else:
                # The stream wants no token, but vLLM drew one: it had run out of memory for this
                # sequence and has computed it again now. Drop the token.
                self._live.set_back(name, stream.num_verified + len(stream.ahead), [])
        for verifier, told in drafted.items():
            self._socket.send_multipart([verifier, encode(told)])

    def _receive(self, verifier: bytes, message: bytes) -> None:
        if not (feedback := decode_feedback(message)):
            return
        if feedback.fresh:
            self._end([id for id in self._streams if id[0] == verifier])
        self._end([(verifier, id) for id in feedback.closed])
        for opened in feedback.opened:
            self._open((verifier, opened.id), opened)
        for told in feedback.verified:
            if stream := self._streams.get((verifier, told.id)):
                self._go_on((verifier, told.id), stream, told)

    def _open(self, id: StreamId, opened: Opened) -> None:
        self._end([id])
        opened = replace(opened, max_tokens=min(opened.max_tokens, self._config.max_model_len))
        stream = DraftStream(opened, self._counts)
        if stream.room <= 0 or not self._knows(opened.token_ids):
            return
        self._num_opened += 1
        name = f"draft-{self._num_opened}"
        self._streams[id], self._names[name], self._sequences[id] = stream, id, name
        self._live.open(name, opened.token_ids, **self._params(opened.sample_key))
        self._follow(name, stream)

    def _go_on(self, id: StreamId, stream: DraftStream, told: Verified) -> None:
        # After a lost message this request gets no more drafts.
        if not (stream.follows(told) and self._knows(told.token_ids)):
            self._end([id])
            return
        back, name = stream.verified(told), self._sequences[id]
        if stream.room <= 0:
            self._end([id])
            return
        if back:
            self._live.set_back(name, *back)
        self._follow(name, stream)

    def _follow(self, name: str, stream: DraftStream) -> None:
        if stream.wants:
            self._wanting.add(name)
        else:
            self._wanting.discard(name)

    def _knows(self, token_ids: list[int]) -> bool:
        """Return whether the drafter's vocabulary has these tokens. The policy's may be larger."""
        return max(token_ids, default=0) < self._live.vocab_size

    def _end(self, ids: list[StreamId]) -> None:
        for id in ids:
            if stream := self._streams.pop(id, None):
                stream.close()
                name = self._sequences.pop(id)
                del self._names[name]
                self._wanting.discard(name)
                self._live.close(name)

    def _params(self, sample_key: int) -> dict[str, Any]:
        """Return the fields of vLLM's `SamplingParams` of a sequence."""
        config = self._config
        return {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "extra_args": {
                "sample_key": sample_key if config.shared_noise else sample_key ^ _OTHER_NOISE
            },
        }

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        config = self._config
        return {
            "model": str(config.path),
            "trust_remote_code": config.trust_remote_code,
            "load_format": "safetensors",
            "dtype": config.dtype,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "enforce_eager": config.enforce_eager or on_cpu,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "worker_extension_cls": "refrain.engines.inference.engine.worker.WorkerExtension",
            **(_CPU_ARGS if on_cpu else {"gpu_memory_utilization": DRAFTER_MEMORY_SHARE}),
        }
