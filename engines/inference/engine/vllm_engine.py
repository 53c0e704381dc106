"""One vLLM engine behind the `Engine` interface. It runs as a Ray actor (`ray_engine.py`)."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import pyarrow as pa
import ray

from refrain.engines.bounded import wait_for
from refrain.engines.environment.client import EnvironmentClient
from refrain.engines.garbage import freeze_garbage
from refrain.engines.gpus.cleanup import Marked, given_gpus, mark_children
from refrain.engines.inference.engine.admission import Admitted, admit, admitted
from refrain.engines.inference.engine.arguments import engine_args
from refrain.engines.inference.engine.conversations import Conversations, TurnLimits, waits
from refrain.engines.inference.engine.drafting_calls import DraftingCalls
from refrain.engines.inference.engine.last_error import last_error
from refrain.engines.inference.engine.metrics_export import stat_loggers
from refrain.engines.inference.engine.parking import HostMemory, Memory, SleepMode
from refrain.engines.inference.engine.process import prepare_process
from refrain.engines.inference.engine.running import Running, num_new_of, states_of
from refrain.engines.inference.engine.trace import EngineTrace
from refrain.engines.inference.kv.saving import KVSaving
from refrain.engines.inference.weights.canary import check_weights
from refrain.engines.inference.weights.received_weights import HandedWeights
from refrain.engines.inference.weights.source import WeightSources
from refrain.engines.rollout.interface import EngineEvents
from refrain.engines.shared_memory import clear_dead
from refrain.engines.store.rows import rollout_rows, to_stream
from refrain.schemas.config import EngineConfig
from refrain.schemas.counts import DraftingCounts, KVCounts
from refrain.schemas.engine import ALONE, EngineSetup
from refrain.schemas.rollout import (
    DraftSetting,
    FinishReason,
    RequestId,
    Rollout,
    RolloutRequest,
    SavedKV,
)
from refrain.schemas.weights import PolicyWeights

POLL_S = 0.25
"""Longest time that `next_events` waits for an event."""
GATHER_S = 0.25
"""Seconds to wait for more finished rollouts: each report costs the store a transaction."""


class VLLMEngine:
    """Generates with exact sampling. See `engines.rollout.interface.Engine` for the contract."""

    _admit = staticmethod(admit)
    """Submits requests to vLLM. Benches override it to compare other ways."""

    def __init__(self, index: int, config: EngineConfig, setup: EngineSetup = ALONE) -> None:
        self.index = index
        self.tp_degree = config.rollout.tp_degree
        self._config, self._setup = config, setup
        self._policy_version: int | None = None
        self._running: dict[RequestId, Running] = {}
        self._finished: list[Rollout] = []
        self._num_acknowledged = 0
        self._wake = asyncio.Event()
        """Set when there is something to report."""
        self._drained = asyncio.Event()
        """Set when no request is running."""
        self._failure: BaseException | None = None
        self._is_parked = False
        self._unchecked: PolicyWeights | None = None
        """Weights that were loaded without a KV cache, so the canary has not checked them yet."""
        self._sources = WeightSources(index, config.rollout.stall_timeout_s)
        self._conversations = self._converse()
        self._trace = EngineTrace(index, config.trace)

    def _converse(self) -> Conversations | None:
        """Return the conversations with the run's environments, or None without environments."""
        if (config := self._config.environment) is None:
            return None
        limits = TurnLimits(config.max_turns, config.max_turn_tokens, config.max_wait_s)
        client = EnvironmentClient(config)
        return Conversations(client, limits, self._go_on, self._finish, self._fail)

    def mark_processes(self, mark: str) -> Marked:
        """Mark all processes that start here, to find them later. Return mark, node and GPUs."""
        mark_children(mark)
        node_id = ray.get_runtime_context().get_node_id()
        return Marked(mark, node_id, self._setup.devices or given_gpus())

    async def start(self) -> None:
        with freeze_garbage():
            await self._start()

    async def _start(self) -> None:
        on_cpu = prepare_process(
            self.tp_degree,
            self._setup.devices,
            model_runner=self._config.rollout.model_runner,
            batch_invariant=self._config.rollout.batch_invariant,
            takes_handles=self._config.rollout.weight_sync == "ipc",
        )
        from vllm import AsyncEngineArgs
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**self._engine_args(on_cpu)),
            stat_loggers=stat_loggers(self._setup.exports_metrics),
        )
        self._drafting = DraftingCalls(self._llm, self._config)
        await self._install()
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest())
        clear_dead()
        self._saving = KVSaving(self._llm, self.tp_degree)
        self._memory: Memory = (HostMemory if on_cpu else SleepMode)(self._llm)
        self._handed = HandedWeights(self._llm, self._memory)

    async def _install(self) -> None:
        await self._llm.collective_rpc("install_exact_sampling")
        if self._config.speculates:
            await self._drafting.install(self._config, self._setup, self.index)
        if self._config.moves_kv:
            await self._llm.collective_rpc("install_kv_saving")
        if self._config.record_experts:
            await self._llm.collective_rpc("install_expert_recording")
            await self._llm.engine_core.call_utility_async("call_scheduler", "record_experts", [])

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        assert self._policy_version is not None, "no weights loaded"
        assert not self._is_parked, "it is parked"
        if self._config.speculates:
            await self._drafting.expect(list({request.id.prompt_key for request in requests}))
        await self._trace.begin(self._llm, requests)
        began = self._begin(requests)
        self._saving.note(requests)
        await self._admit(self._llm, [self._admitted(r) for r in began if not self._waits(r)])

    def _admitted(self, running: Running) -> Admitted:
        own = self._conversations
        max_tokens = own.limits.max_tokens(running.request) if own else None
        return admitted(running, self._config, partial(self._end, running), max_tokens)

    def _waits(self, running: Running) -> bool:
        """Return whether the request waits for its environment, which is asked then."""
        own = self._conversations
        if own is None or not waits(running.request.generated):
            return False
        own.ask(running.request)
        return True

    async def _go_on(self, request: RolloutRequest) -> None:
        """Submit the next turn of a conversation, unless it was withdrawn meanwhile."""
        before = self._running[request.id]
        if before.withdrawn:
            self._leave(before, request)
            return
        running = self._running[request.id] = before.with_answer(request)
        await self._admit(self._llm, [self._admitted(running)])

    async def withdraw(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        leaving = [self._running[id] for id in ids if id in self._running]
        if not (keep_kv and self._config.moves_kv and leaving):
            return await self._take_out(leaving)
        async with self._saving.paused():
            kv = await self._saved_kv(leaving)
            withdrawn = await self._take_out(leaving)
        return [replace(request, kv=kv.get(request.id)) for request in withdrawn]

    async def precopy(self, ids: Sequence[RequestId]) -> SavedKV | None:
        there = [self._running[id] for id in ids if id in self._running]
        if not (self._config.moves_kv and there):
            return None
        assert self._policy_version is not None
        return await self._saving.save_ahead(self._num_with_kv(there), self._policy_version)

    async def expect_kv(self, saved: Sequence[SavedKV]) -> None:
        if self._config.moves_kv and self._policy_version is not None:
            await self._saving.expect(saved, self._policy_version)

    async def copy(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        there = [self._running[id] for id in ids if id in self._running]
        if not (keep_kv and self._config.moves_kv and there):
            return self._copies(there)
        assert self._policy_version is not None
        async with self._saving.paused():
            num_tokens = self._num_with_kv(there)
            kv = await self._saving.save(num_tokens, self._policy_version, copies=True)
            copies = self._copies(there)
        return [replace(request, kv=kv.get(request.id)) for request in copies]

    def _copies(self, running: Sequence[Running]) -> list[RolloutRequest]:
        states = states_of(self._llm)
        named = ((one, states.get(str(one.request.id))) for one in running)
        copies = [one.continued_by(one.generated_so_far(state)) for one, state in named if state]
        if own := self._conversations:
            copies += [r for one in running if (r := own.waiting(one.request.id))]
        return copies

    async def _take_out(self, leaving: Sequence[Running]) -> list[RolloutRequest]:
        for running in leaving:
            running.withdrawn = True
        # Before this returns, aborted requests have ended with their tokens so far.
        await self._llm.abort([str(running.request.id) for running in leaving])
        if own := self._conversations:
            for running in leaving:
                if waiting := own.withdraw(running.request.id):
                    self._leave(running, waiting)
            await own.ended([running.request.id for running in leaving])
        return [r.continuation for r in leaving if r.continuation is not None]

    def _leave(self, running: Running, continuation: RolloutRequest) -> None:
        self._forget(running.request.id)
        running.continuation = continuation

    async def _saved_kv(self, leaving: Sequence[Running]) -> dict[RequestId, SavedKV]:
        """Save keys and values. A request without a token from here keeps those it came with."""
        assert self._policy_version is not None
        num_tokens = self._num_with_kv(leaving)
        saved = await self._saving.save(num_tokens, self._policy_version)
        came_with = {r.request.id: r.request.kv for r in leaving if r.request.id not in num_tokens}
        return saved | {id: kv for id, kv in came_with.items() if kv is not None}

    def _num_with_kv(self, running: Sequence[Running]) -> dict[RequestId, int]:
        """Return the tokens with keys and values of each request that has tokens from here."""
        told = num_new_of(self._llm)
        num_new = {r: told.get(str(r.request.id), 0) for r in running}
        return {r.request.id: r.num_with_kv(new) for r, new in num_new.items() if new}

    async def redraft(self, settings: Mapping[RequestId, DraftSetting]) -> None:
        here = {id: setting for id, setting in settings.items() if id in self._running}
        for id, setting in here.items():
            running = self._running[id]
            running.request = replace(running.request, drafting=setting)
        if here:
            named = {str(id): astuple(setting) for id, setting in here.items()}
            await self._llm.collective_rpc("redraft", args=(named,))

    async def call_drafting(self, method: str, *args: Any) -> None:
        """Call a method of `WorkerExtension`, between two steps."""
        await self._llm.collective_rpc(method, args=args)

    async def load_weights(self, weights: PolicyWeights) -> float:
        assert not self._running, "weights change only between rollouts"
        assert not self._is_parked or self._setup.keeps_weights, "its weights would be lost"
        self._saving.clear()
        await self._trace.end(self._llm)
        await self._memory.take_weights()
        if not await self._handed.are_of(weights.policy_version):
            await self._sources.load(self._llm, weights)
        await self._llm.reset_prefix_cache()
        self._policy_version = weights.policy_version
        if self._is_parked and not self._memory.has_kv_cache:
            self._unchecked = weights
            return 0.0
        await self._memory.take_kv_cache()
        return await self._check_weights(weights)

    async def _check_weights(self, weights: PolicyWeights) -> float:
        if self._config.specactor.head:
            await self._llm.collective_rpc("follow_weights")
        tolerance, dtype = self._config.rollout.canary_tolerance, self._config.model.dtype
        return await check_weights(self._llm, self.index, weights, dtype, tolerance)

    async def take_handed(self, method: str, *args: Any) -> None:
        """Run one call of the trainer's hand-over (`HandedWeights`), while it has the GPUs.

        `load_weights` then finds the weights there and need not load them."""
        assert self._policy_version is None, "it is not asleep"
        await getattr(self._handed, method)(*args)

    async def park(self) -> None:
        assert not self._running, "it has requests"
        if not self._is_parked:
            await self._memory.leave(weights=not self._setup.keeps_weights)
        self._is_parked = True

    async def sleep(self) -> None:
        assert not self._running, "it has requests"
        await self._memory.leave(weights=True)
        self._handed.forget()
        self._policy_version = self._unchecked = None

    async def wake(self) -> bool:
        """Raise `WeightSyncError` if weights that were loaded meanwhile fail the canary."""
        self._is_parked = False
        if self._memory.has_weights and self._policy_version is not None:
            await self._memory.take_kv_cache()
            unchecked, self._unchecked = self._unchecked, None
            if unchecked:
                await self._check_weights(unchecked)
        return self._policy_version is not None

    async def take_kv_counts(self) -> KVCounts:
        return await self._saving.take_counts()

    async def take_drafting_counts(self) -> DraftingCounts:
        return await self._drafting.take_counts() if self._config.speculates else DraftingCounts()

    async def next_events(self, num_received: int) -> tuple[EngineEvents, pa.Buffer | None]:
        """Return events, and the stream of the finished rollouts' rows, as two replies.

        Repeat a finished rollout until `num_received` counts it: an abandoned call loses it.
        """
        num_new = max(0, num_received - self._num_acknowledged)
        del self._finished[:num_new]
        self._num_acknowledged += num_new
        with contextlib.suppress(TimeoutError):
            if not self._finished:
                await wait_for(self._wake.wait(), POLL_S)
            if self._running:
                await wait_for(self._drained.wait(), GATHER_S)
        self._wake.clear()
        if self._failure is not None:
            raise RuntimeError(f"vLLM failed: {self._failure!r}") from self._failure
        own = [r.request for r in self._running.values() if r.request.drafting]
        drafting = await self._drafting.progress(own) if own else {}
        finished = tuple(rollout.without_tokens(row) for row, rollout in enumerate(self._finished))
        rows = to_stream(rollout_rows(self._finished)) if finished else None
        num_waiting = self._conversations.num_waiting if self._conversations else 0
        return EngineEvents(finished, self._progress(), drafting, num_waiting), rows

    async def last_error(self) -> str:
        return last_error()

    async def shutdown(self) -> None:
        self._llm.shutdown()
        self._saving.clear()

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        return engine_args(self._config, self.index, on_cpu)

    def _progress(self) -> dict[RequestId, int]:
        new, here = num_new_of(self._llm), self._running.items()
        return {id: running.num_sampled_before + new.get(str(id), 0) for id, running in here}

    def _begin(self, requests: Sequence[RolloutRequest]) -> list[Running]:
        assert self._policy_version is not None, "no weights loaded"
        now_s = time.time()
        began = {r.id: Running(r, self._policy_version, now_s) for r in requests}
        assert len(began) == len(requests), "a request was submitted twice"
        assert not (here := began.keys() & self._running.keys()), f"submitted twice: {here}"
        self._running |= began
        if began:
            self._drained.clear()
        return list(began.values())

    def _end(self, running: Running, output: Any) -> None:
        """Handle the final output of a request, or the error that ended it."""
        try:
            if isinstance(output, Exception):
                raise output
            self._take_final(running, output)
        except Exception as error:
            self._fail(error)

    def _take_final(self, running: Running, final: Any) -> None:
        (output,) = final.outputs
        generated = running.generated_with(output)
        if running.num_cached_tokens is None:
            running.num_cached_tokens = final.num_cached_tokens or 0
        if output.finish_reason == "abort" and running.withdrawn:
            self._leave(running, running.continued_by(generated))
            return
        request, reason = replace(running.request, generated=generated), output.finish_reason
        if self._conversations:
            running.request = self._conversations.turn_ended(request, FinishReason(reason))
        else:
            self._finish(request, FinishReason(reason))

    def _finish(self, request: RolloutRequest, reason: FinishReason) -> None:
        """Report a finished response, whose tokens are `request.generated`."""
        running = self._forget(request.id)
        assert request.generated
        self._finished.append(
            Rollout(
                request=replace(request, generated=None),
                generated=request.generated,
                finish_reason=reason,
                engine=self.index,
                started_s=running.started_s,
                finished_s=time.time(),
                num_cached_tokens=running.num_cached_tokens or 0,
            )
        )
        self._wake.set()

    def _forget(self, id: RequestId) -> Running:
        running = self._running.pop(id)
        if not self._running:
            self._drained.set()
        return running

    def _fail(self, error: BaseException) -> None:
        # vLLM's own error says nothing if it has a cause.
        self._failure = error.__cause__ or error
        self._wake.set()
        self._drained.set()
