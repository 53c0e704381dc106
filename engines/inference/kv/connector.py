"""Load keys and values of requests that come from another engine (vLLM 0.32, V1 connector).

    scheduler     `SamplingParams.extra_args` names the request's files. Their tokens need no
                  prefill, like those in the prefix cache.
    each rank     Before the forward pass, it copies its heads from the files of all ranks that
                  saved some of them, into the blocks of the request.

The two engines may differ in their TP degree; vLLM's own connectors require the same one. A missing
or wrong file is no error: the engine computes the tokens again.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

from refrain.engines.inference.kv.files import (
    UNREADABLE,
    KVFiles,
    SavedBlocks,
    part_files,
    rank_file,
    write_blocks,
)
from refrain.engines.inference.kv.heads import pieces, saves
from refrain.engines.inference.kv.precopy import PreCopies
from refrain.engines.inference.kv.saving import KVSource

logger = init_logger(__name__)

KV = "kv"
"""Key of the fields of `KVSource` in `SamplingParams.extra_args`."""


@dataclass(frozen=True)
class Load:
    """Keys and values to load for a request before the next forward pass."""

    source: KVSource
    first: int
    """First block to load. The prefix cache has the blocks before it."""
    blocks: Sequence[int]
    """Ids of the cache blocks to fill, from `first` on."""


@dataclass
class Loads(KVConnectorMetadata):
    """Loads of one step."""

    loads: list[Load] = field(default_factory=list)


class KVConnector(KVConnectorBase_V1):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._model = str(model.model)
        self._num_heads = model.get_total_num_kv_heads()
        self._tp_degree = parallel.tensor_parallel_size
        self._block_size = vllm_config.cache_config.block_size
        self._caches: dict[str, Tensor] = {}
        self._precopies = PreCopies()
        self._files = KVFiles()
        self._num_bytes, self._load_s = 0, 0.0
        """Bytes and seconds of loads since the last `take_loads`."""
        self._failed_blocks: set[int] = set()
        self._sources: dict[str, KVSource | None] = {}
        """Source of each request, checked once; None without a usable one."""
        self._num_cached: dict[str, int] = {}
        """Tokens in the prefix cache, for requests that are being scheduled."""
        self._loads: list[Load] = []

    # These run on each rank.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._caches = kv_caches

    def save(
        self,
        directory: Path,
        blocks: Mapping[str, Sequence[int]],
        num_tokens: Mapping[str, int],
        policy_version: int,
        names: Mapping[str, str],
        with_ahead: bool,
    ) -> int:
        """Write this rank's heads, unless another rank writes them. Return the bytes written.

        Raise OSError if writing fails.

        Args:
            directory: directory of this withdrawal.
            blocks: block ids, by vLLM's name of the request.
            num_tokens: tokens to save, by vLLM's name.
            policy_version: weights that computed the keys and values.
            names: name to save a request under, by vLLM's name.
            with_ahead: leave out blocks that were saved ahead to the same directory.
        """
        if not blocks or not self._saves:
            return 0
        rows = {
            id: self._rows(of_one[: -(-num_tokens[id] // self._block_size)])
            for id, of_one in blocks.items()
        }
        precopied = self._precopies.take(rows) if with_ahead else {}
        num_ahead = {id: sum(e.num_blocks for e in extents) for id, extents in precopied.items()}
        return write_blocks(
            rank_file(directory, self._rank),
            self._caches,
            {names[id]: own[num_ahead.get(id, 0) :] for id, own in rows.items()},
            {names[id]: num_tokens[id] for id in rows},
            self._identity(self._tp_degree, policy_version),
            {names[id]: extents for id, extents in precopied.items()},
        )

    def save_ahead(
        self,
        directory: Path,
        blocks: Mapping[str, Sequence[int]],
        num_tokens: Mapping[str, int],
        policy_version: int,
    ) -> Path | None:
        """Start to write the full blocks of requests (by vLLM's names) that go on generating.

        Return what `PreCopies.begin` returns.
        """
        if not self._saves:
            return None
        return self._precopies.begin(
            lambda part: rank_file(directory, self._rank, part),
            self._caches,
            {
                id: self._rows(of_one[: num_tokens[id] // self._block_size])
                for id, of_one in blocks.items()
            },
            self._identity(self._tp_degree, policy_version),
        )

    def forget(self, ids: Iterable[str]) -> None:
        """Forget what was saved ahead for requests that lost their blocks, by vLLM's names."""
        self._precopies.drop(ids)

    def expect(self, directory: Path, tp_degree: int, policy_version: int) -> None:
        """Map this rank's heads in the files that were saved ahead for requests that may arrive.

        Skip unreadable files. A later step without loads closes all files.
        """
        identity = self._identity(tp_degree, policy_version)
        for piece in pieces(self._rank, self._tp_degree, tp_degree, self._num_heads):
            for path in part_files(directory, piece.saved_by):
                with suppress(*UNREADABLE):
                    self._files.open(path, identity).touch()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        if not metadata.loads:
            self._files.close()
            return
        started_s = time.perf_counter()
        for load in metadata.loads:
            try:
                self._num_bytes += self._load(load)
            except UNREADABLE as error:
                logger.warning("recomputing %s: %s", load.source.name, error)
                self._failed_blocks.update(load.blocks)
        self._load_s += time.perf_counter() - started_s

    def take_loads(self) -> tuple[int, float]:
        """Return (bytes, seconds) loaded since the last call."""
        loads, self._num_bytes, self._load_s = (self._num_bytes, self._load_s), 0, 0.0
        return loads

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: `start_load_kv` has loaded all layers."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: no layer is saved during a forward pass."""

    def wait_for_save(self) -> None:
        """Do nothing: no layer is saved during a forward pass."""

    def _load(self, load: Load) -> int:
        """Load keys and values. Return their bytes."""
        source, to = load.source, torch.tensor(self._rows(load.blocks))
        skipped = load.first * self._rows_per_block
        identity = self._identity(source.tp_degree, source.policy_version)
        for piece in pieces(self._rank, self._tp_degree, source.tp_degree, self._num_heads):
            self._files.copy_heads(
                Path(source.path), identity, source.name, skipped, piece, self._caches, to
            )
        return sum(len(to) * cache[0].nbytes for cache in self._caches.values())

    @property
    def _rank(self) -> int:
        return get_tensor_model_parallel_rank()

    @property
    def _saves(self) -> bool:
        return saves(self._rank, self._tp_degree, self._num_heads)

    @property
    def _rows_per_block(self) -> int:
        """Cache rows per scheduler block. A kernel may use smaller blocks than the scheduler."""
        tokens = next(iter(self._caches.values())).shape[2]
        assert self._block_size % tokens == 0
        return self._block_size // tokens

    def _rows(self, blocks: Sequence[int]) -> list[int]:
        """Return the cache rows of the scheduler's blocks."""
        each = self._rows_per_block
        return [block * each + i for block in blocks for i in range(each)]

    # These run in the scheduler.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        source = self._source_of(request)
        if source is None:
            return 0, False
        # The last token is computed, to draw the next one.
        useful = min(source.num_tokens, request.num_tokens - 1)
        self._num_cached[request.request_id] = num_computed_tokens
        return max(0, useful - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        num_cached = self._num_cached.pop(request.request_id, 0)
        source = self._sources.get(request.request_id)
        if source is None or not num_external_tokens:
            return
        first = num_cached // self._block_size
        end = -(-(num_cached + num_external_tokens) // self._block_size)
        (block_ids,) = blocks.get_block_ids()
        self._loads.append(Load(source, first, block_ids[first:end]))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        del scheduler_output
        loads, self._loads = Loads(self._loads), []
        if not loads.loads:
            self._files.close()
        return loads

    def recompute(self, request_id: str) -> None:
        """Load nothing more for a request: a rank could not."""
        self._sources[request_id] = None

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        self._sources.pop(request.request_id, None)
        self._num_cached.pop(request.request_id, None)
        return False, None

    def _source_of(self, request: Any) -> KVSource | None:
        id = request.request_id
        if id not in self._sources:
            given = (request.sampling_params.extra_args or {}).get(KV)
            self._sources[id] = self._usable(KVSource(*given)) if given else None
        return self._sources[id]

    def _usable(self, source: KVSource) -> KVSource | None:
        """Return the source, or None if a file is missing or wrong.

        Check now: the scheduler can still schedule the tokens for prefill.
        """
        try:
            for rank in range(source.tp_degree):
                if saves(rank, source.tp_degree, self._num_heads):
                    self._check(source, rank)
        except UNREADABLE as error:
            logger.warning("recomputing %s: %s", source.name, error)
            return None
        return source

    def _check(self, source: KVSource, rank: int) -> None:
        saved = self._saved(source, rank)
        if saved.num_tokens != source.num_tokens:
            raise ValueError(f"{source.path} has {saved}, expected {source.num_tokens} tokens")

    def _saved(self, source: KVSource, rank: int) -> SavedBlocks:
        identity = self._identity(source.tp_degree, source.policy_version)
        last = self._files.open(rank_file(source.path, rank), identity)
        saved = last.find(source.name)
        for extent in saved.extents:
            self._files.open(rank_file(source.path, rank, extent.part), identity)
        return saved

    # These run in both.

    def _identity(self, tp_degree: int, policy_version: int) -> dict[str, str]:
        """Return the properties that a file must share with the engine that reads it."""
        return {
            "model": self._model,
            "num_heads": str(self._num_heads),
            "block_size": str(self._block_size),
            "tp_degree": str(tp_degree),
            "policy_version": str(policy_version),
        }
