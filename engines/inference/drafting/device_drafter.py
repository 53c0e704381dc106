"""Drafts from history on the device, after each step of vLLM's V2 runner (vLLM 0.32).

With asynchronous scheduling the host learns the tokens of a step when the next one runs already. So
the device drafts: it has the tokens of all requests, and here the indexes of their prompts too.

    index file ─thread─► device        a slot of the table ─► requests of the prompt
    step ends: last tokens of each request ─► longest match in its indexes ─► draft of the next step

A draft head drafts beside the indexes (`specactor.head`), and `DraftChoice` picks between both.

How many tokens of a draft are verified was decided before (`room`). Deviations from RhymeRL 5.3:
occurrences count, rewards do not; a draft takes the middle of its matches (`histospec.refill`). In
a later turn of a conversation, only tokens of that turn are matched, not the observation before it.
"""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d

from refrain.engines.histospec.index import HistoryIndex, build_index
from refrain.engines.histospec.matching import MAX, MIN, NO_INDEX, IndexTable
from refrain.engines.histospec.request_indexes import RequestIndexes
from refrain.engines.inference.drafting.draft_choice import NO_DRAFT, DraftChoice
from refrain.engines.inference.drafting.engine_head import DrawNext, EngineHead
from refrain.engines.inference.engine.extra_args import PROMPT_KEY
from refrain.schemas.config import EngineConfig
from refrain.schemas.drafting import DEVICE_INDEX_BYTES


def install(runner: Any, config: EngineConfig) -> None:
    """Replace a V2 runner's speculator. Call once, after the exact samplers were installed and
    before the first request."""
    drafter = runner.speculator = DeviceDrafter(runner, config)
    drafter.warm()
    add, remove = runner.sampler.add_request, runner.req_states.remove_request

    def add_request(slot: int, params: Any) -> None:
        add(slot, params)
        drafter.begin(slot, (params.extra_args or {}).get(PROMPT_KEY, ""))

    def remove_request(id: str) -> int | None:
        if (slot := remove(id)) is not None:
            drafter.end(slot)
        return slot

    runner.sampler.add_request, runner.req_states.remove_request = add_request, remove_request


class DeviceIndex(NamedTuple):
    index: HistoryIndex
    on_device: Tensor
    """int32 [2 tokens]: text and order."""


class DeviceTable(IndexTable):
    """Indexes on a GPU, by slot."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.base = torch.zeros(1, dtype=torch.int32, device=device)
        """Places in memory are given by their distance from here, in int32."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._tensors: dict[int, Tensor] = {}
        self._places = np.zeros((0, 3), np.int64)
        self._on_device: Tensor | None = None
        self._num_bytes = 0

    def load(self, index: HistoryIndex) -> DeviceIndex | None:
        """Copy an index to the device, in a thread of its own. Return None if there is no room."""
        num_bytes = index.text.nbytes + index.order.nbytes
        if self._num_bytes + num_bytes > DEVICE_INDEX_BYTES:
            return None
        on_host = torch.from_numpy(np.concatenate([index.text, index.order])).pin_memory()
        with torch.cuda.stream(self._stream):
            on_device = on_host.to(self._device, non_blocking=True)
        self._stream.synchronize()
        self._num_bytes += num_bytes
        weakref.finalize(on_device, self._freed, num_bytes)
        return DeviceIndex(index, on_device)

    def _freed(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes

    def add(self, index: DeviceIndex) -> int:  # ty: ignore[incompatible-method-override]
        slot = super().add(index.index)
        if len(self._places) < len(self.rows):
            self._places = np.pad(self._places, ((0, len(self.rows) - len(self._places)), (0, 0)))
        tensor, num = index.on_device, len(index.index.text)
        # The memory may be used again only after the steps that read it.
        tensor.record_stream(torch.cuda.current_stream(self._device))
        at = (tensor.data_ptr() - self.base.data_ptr()) // tensor.element_size()
        self._tensors[slot], self._places[slot] = tensor, (at, at + num, num)
        self._on_device = None
        return slot

    def remove(self, slot: int) -> None:
        super().remove(slot)
        del self._tensors[slot]
        self._places[slot] = 0
        self._on_device = None

    @property
    def on_device(self) -> Tensor:
        """int64 [slots, 3]: where the text and the order of each index begin, and its tokens."""
        if self._on_device is None:
            self._on_device = async_tensor_h2d(self._places.copy(), device=self._device)
        return self._on_device


class DeviceDrafter:
    """Speculator of a V2 runner. On more than one rank, the first one drafts for all."""

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0

    def __init__(self, runner: Any, config: EngineConfig) -> None:
        self._states = runner.req_states
        self._device = torch.device(runner.device)
        self._on_cpu = self._device.type == "cpu"
        self._drafts = torch.zeros_like(self._states.draft_tokens)
        self._window = min(self._drafts.shape[1], config.drafting.max_draft)
        self._ranks = get_tp_group()
        self._is_on = config.drafting.enabled and self._ranks.rank_in_group == 0
        self._table = None if self._on_cpu else DeviceTable(self._device)
        self._indexes = RequestIndexes(
            Path(config.history_dir),
            len(self._drafts),
            shares=config.drafting.shared_tokens > 0,
            table=self._table,
            load=self._load,
        )
        self.head: EngineHead | None = None
        if (directory := config.specactor.head) is not None:
            self.head = EngineHead(runner, directory)
        self._sampler = runner.sampler
        self._choice = DraftChoice(len(self._drafts), self._window, self._device)
        self._head_window = min(self._window, config.specactor.window)
        self._keys: dict[int, str] = {}
        self._slots_known: np.ndarray | None = None
        self._slots_on_device: Tensor | None = None

    def warm(self) -> None:
        """Compile the kernels, for which the first step with a history would wait otherwise."""
        if self._table is None:
            return
        index = build_index([], [[1, 2, 3, 4, 5]], [1.0], max_draft=self._window)
        loaded = self._table.load(index)
        assert loaded is not None
        slot = self._table.add(loaded)
        slots = np.full((len(self._drafts), 1), slot, np.int32)
        one = torch.ones(1, dtype=torch.int32, device=self._device)
        self._draft_on_gpu(slots, one.long() - 1, one, self._drafts[:1, : self._window])
        self._table.remove(slot)

    def _load(self, index: HistoryIndex) -> Any:
        """Return what the table takes, or None if the index cannot be used."""
        # An index is sorted no deeper than its longest draft.
        if index.max_draft < self._window:
            return None
        return self._table.load(index) if self._table else index

    def expect(self, prompt_keys: Sequence[str]) -> None:
        """Load the indexes of these prompts in a thread: requests for them are on their way."""
        if self._is_on:
            self._indexes.expect(prompt_keys)

    def take_counts(self) -> dict[str, int]:
        """Return the counts of indexes since the last call."""
        names = ("num_damaged", "num_with_index", "num_without_index")
        counts = {name: int(getattr(self._indexes, name)) for name in names}
        for name in names:
            setattr(self._indexes, name, 0)
        return counts

    def begin(self, slot: int, key: str) -> None:
        if self.head:
            self._choice.begin(slot)
        if self._is_on:
            self._keys[slot] = key
            self._indexes.begin(slot, key)

    def end(self, slot: int) -> None:
        if (key := self._keys.pop(slot, None)) is not None:
            self._indexes.end(slot, key)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: there is no draft model."""

    def capture(self) -> None:
        """Do nothing: there is no draft model."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        *_: Any,
        dummy_run: bool = False,
        **__: Any,
    ) -> Tensor:
        """Return drafts for the next step, int64 [rows, window]. Where there is nothing to draft,
        token 0 stands in, which is verified like any other."""
        del attn_metadata, slot_mappings, aux_hidden_states
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run:
            return drafts
        window = drafts[:, : self._window]
        if self._is_on:
            self._indexes.follow()
            slots = self._slots()
            if (slots == NO_INDEX).all():
                window.zero_()
            elif self._on_cpu:
                self._draft_on_cpu(slots, input_batch.idx_mapping.numpy(), num_sampled, window)
            else:
                self._draft_on_gpu(slots, input_batch.idx_mapping, num_sampled, window)
        elif self.head:
            window.zero_()
        if self.head:
            rows = input_batch.query_start_loc[1 : len(drafts) + 1] - 1 - num_rejected
            hidden = last_hidden_states[rows]
            window.copy_(self._with_head(window, hidden, input_batch, num_sampled))
        if self._ranks.world_size > 1:
            self._ranks.broadcast(drafts, src=0)
        return drafts

    def _with_head(
        self, by_history: Tensor, hidden: Tensor, batch: Any, num_sampled: Tensor
    ) -> Tensor:
        """Return the better draft of each request, int64 [requests, window].

        `by_history`: int64 [requests, window], all 0 where history has none. `hidden`: [requests,
        hidden size], what the last tokens were drawn from.
        """
        assert self.head is not None
        slots = batch.idx_mapping.long()
        num_tokens, all_tokens = self._states.total_len.gpu[slots], self._states.all_token_ids.gpu
        last = num_tokens.long() - 1
        columns = torch.arange(self._window, device=self._device)
        at = (last - num_sampled + 1)[:, None] + columns
        emitted = all_tokens[slots[:, None], at.clamp(max=all_tokens.shape[1] - 1)]
        self._choice.learn(slots, emitted.long(), num_sampled)
        drawn = self.head.draft(
            hidden, all_tokens[slots, last].long(), last, self._head_window, self._foresee(batch)
        )
        by_head = by_history.new_full(by_history.shape, NO_DRAFT)
        # Other requests have drawn nothing, and their prefill goes on.
        by_head[:, : self._head_window] = drawn.masked_fill(num_sampled[:, None] == 0, NO_DRAFT)
        has_none = (by_history == 0).all(dim=1, keepdim=True)
        drafts = torch.stack([by_history.masked_fill(has_none, NO_DRAFT), by_head])
        return self._choice.choose(slots, drafts).clamp(min=0)

    def _foresee(self, batch: Any) -> DrawNext:
        return lambda logits, columns, last: self._sampler.foresee(logits, columns, batch, last)

    def _slots(self) -> np.ndarray:
        """Return the indexes of each request; int32 [requests, indexes]."""
        own, shared = self._indexes.slots, self._indexes.shared_slots
        return np.column_stack([own, np.broadcast_to(shared, (len(own), len(shared)))])

    def _draft_on_cpu(
        self, slots: np.ndarray, requests: np.ndarray, num_sampled: Tensor, drafts: Tensor
    ) -> None:
        from refrain.engines.histospec.refill import refill

        window = drafts.shape[1]
        found = np.zeros(drafts.shape, np.int32)
        refill(
            self._indexes.table.rows,
            np.ascontiguousarray(slots[requests]),
            self._states.all_token_ids.gpu.numpy()[requests],
            self._states.total_len.gpu.numpy()[requests],
            np.where(num_sampled.numpy() > 0, window, 0).astype(np.int32),
            found,
        )
        drafts.copy_(torch.from_numpy(found))

    def _draft_on_gpu(
        self, slots: np.ndarray, requests: Tensor, num_sampled: Tensor, drafts: Tensor
    ) -> None:
        from refrain.engines.inference.drafting.refill_kernel import refill_on_device

        table = self._table
        assert table is not None
        if self._slots_known is None or not np.array_equal(slots, self._slots_known):
            self._slots_known = slots
            self._slots_on_device = async_tensor_h2d(slots, device=self._device)
        assert self._slots_on_device is not None
        used = table.rows[:, [MIN, MAX]].max(axis=0)
        refill_on_device(
            table.base,
            table.on_device,
            self._slots_on_device,
            requests,
            num_sampled,
            self._states.all_token_ids.gpu,
            self._states.total_len.gpu,
            drafts,
            int(used[0]),
            int(used[1]),
        )
