"""The drafters that `benchmarks.drafting` compares."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numba import int32, njit

from refrain.benchmarks import arctic
from refrain.benchmarks.lockstep import Batch, LockstepDrafter, Rows
from refrain.benchmarks.stock import NGRAM_WINDOW
from refrain.engines.histospec.drafter import DraftedRequest, HistoryDrafter
from refrain.engines.histospec.drafting import (
    LONGEST_ALONE,
    NO_KEY,
    draft_batch,
    without_noise,
    without_turns,
)
from refrain.engines.histospec.gate import Gate, StepTimes
from refrain.engines.histospec.index import HistoryIndex, build_index
from refrain.engines.histospec.index_file import index_path, write_index
from refrain.engines.histospec.library import PromptHistory
from refrain.engines.histospec.matching import NO_INDEX, IndexTable
from refrain.engines.histospec.refill import refill
from refrain.engines.histospec.shared import SharedLibrary
from refrain.engines.histospec.window import WindowPolicy, window_policy
from refrain.engines.histospec.workers import BUILD_PROMPTS
from refrain.engines.inference.profiling.engine import NGRAM_SIZES
from refrain.schemas.drafting import DraftingConfig

NGRAM_MIN, NGRAM_MAX = NGRAM_SIZES
ARCTIC_WINDOW = 32
"""Longest draft, as in the history's window policies."""


class NGram(LockstepDrafter):
    """vLLM's prompt lookup: draft what followed the earliest of the longest matches in the
    request."""

    cap = NGRAM_WINDOW

    def draft(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        drafts = np.zeros((len(rows.live), self.cap), np.int32)
        return drafts, look_up(rows.token_ids, rows.num_tokens, rows.room, drafts)


@njit
def _num_matched(tokens, end):
    """Return how many of the last tokens, at most `NGRAM_MAX`, also stand before `end`."""
    n, most = len(tokens), min(NGRAM_MAX, end)
    for length in range(most):
        if tokens[end - 1 - length] != tokens[n - 1 - length]:
            return length
    return most


@njit([int32[::1](int32[:, ::1], int32[::1], int32[::1], int32[:, ::1])], cache=True)
def look_up(token_ids, num_tokens, room, drafts):
    """Fill `drafts`, int32 [rows, window]; return the number of drafted tokens, int32 [rows]."""
    num_drafted = np.zeros(len(num_tokens), np.int32)
    for row in range(len(num_tokens)):
        tokens = token_ids[row, : num_tokens[row]]
        best, best_end = NGRAM_MIN - 1, len(tokens)
        for end in range(NGRAM_MIN, len(tokens)):
            length = _num_matched(tokens, end)
            if length > best:
                best, best_end = length, end
        count = min(drafts.shape[1], room[row], len(tokens) - best_end)
        drafts[row, :count] = tokens[best_end : best_end + count]
        num_drafted[row] = count
    return num_drafted


class Windows(LockstepDrafter):
    """The history index with a window policy and no gate: every draft is verified."""

    def __init__(self, policy: WindowPolicy, config: DraftingConfig) -> None:
        self.cap = policy.cap
        self._policy, self._config = policy, config

    def begin(self, batch: Batch, ends: np.ndarray) -> None:
        self._table = IndexTable()
        slots = {
            key: self._table.add(index_of(batch, key, self._config, self.cap))
            for key in dict.fromkeys(batch.keys)
            if key in batch.history
        }
        self._slots = np.array([slots.get(key, NO_INDEX) for key in batch.keys], np.int32)
        self._windows = self._policy.first(len(ends))

    def draft(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        drafts = np.zeros((len(rows.live), self.cap), np.int32)
        self._num_drafted = draft_batch(
            self._table.rows,
            self._slots[rows.live],
            rows.token_ids,
            rows.num_tokens,
            np.minimum(self._windows[rows.live], rows.room),
            without_noise(len(rows.live)),
            without_turns(len(rows.live)),
            LONGEST_ALONE,
            drafts,
            np.zeros(drafts.shape, np.uint16),
        )
        return drafts, self._num_drafted

    def observe(self, rows: Rows, num_accepted: np.ndarray) -> None:
        now = self._windows[rows.live]
        self._windows[rows.live] = self._policy.next(now, self._num_drafted, num_accepted)


class Shipped(LockstepDrafter):
    """An engine's own drafter with its gate and the defaults of a training run."""

    def __init__(
        self,
        config: DraftingConfig,
        times: StepTimes | None,
        max_rows: int,
        directory: Path,
        epoch_steps: int = 0,
        *,
        rewarded: bool = True,
    ) -> None:
        """`times`: step times for the gate; None verifies everything. `directory`: of the index
        files, created if missing. `epoch_steps`: see `SharedLibrary`. `rewarded`: whether rewards
        count."""
        self.cap = config.max_draft
        self._config, self._directory, self._rewarded = config, directory, rewarded
        windows = window_policy(config.window, config.max_draft)
        gate = Gate(times if config.gate else None)
        directory.mkdir(exist_ok=True)
        self._shared = SharedLibrary(directory, config, epoch_steps)
        self._drafter = HistoryDrafter(directory, windows, gate, max_rows)
        self._num_batches = 0

    def begin(self, batch: Batch, ends: np.ndarray) -> None:
        if not self._rewarded:
            history = {key: _unrewarded(group) for key, group in batch.history.items()}
            batch = replace(batch, history=history)
        self._num_batches += 1
        self._drafter.end_others([])
        # Keys of a trace may not be valid file names.
        names = {key: str(i) for i, key in enumerate(dict.fromkeys(batch.keys))}
        for key, name in names.items():
            path = index_path(self._directory, name)
            path.unlink(missing_ok=True)
            if key in batch.history:
                write_index(index_of(batch, key, self._config, self.cap), name, path)
        self._drafter.expect(names.values())
        self._drafter.settle()
        ids = [f"{self._num_batches}-{row}" for row in range(len(ends))]
        requests = zip(ids, batch.keys, ends.tolist(), strict=True)
        for row, (id, key, end) in enumerate(requests):
            known = self._config.look_ahead and batch.sample_keys
            sample_key = batch.sample_keys[row] if known else NO_KEY
            self._drafter.begin(DraftedRequest(id, names[key], end, sample_key=sample_key))
        self._places = self._drafter.places(ids)
        self._num_sampled = np.ones(len(ends), np.int32)

    def learn(self, groups: Sequence[PromptHistory]) -> None:
        if not self._rewarded:
            groups = [*map(_unrewarded, groups)]
        for first in range(0, len(groups), BUILD_PROMPTS):
            self._shared.add(groups[first : first + BUILD_PROMPTS])

    def draft(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        drafted = self._drafter.propose(
            self._places[rows.live],
            self._num_sampled[rows.live],
            rows.token_ids,
            rows.num_tokens,
            rows.token_ids.size,
        )
        return _as_arrays(drafted, self.cap)

    def observe(self, rows: Rows, num_accepted: np.ndarray) -> None:
        self._num_sampled[rows.live] = num_accepted + 1


class OnDevice(Shipped):
    """The drafter of vLLM's V2 runner, with the same indexes. It always drafts all it can."""

    def draft(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        indexes = self._drafter.indexes
        indexes.follow()
        own, shared = indexes.slots[self._places[rows.live]], indexes.shared_slots
        slots = np.column_stack([own, np.broadcast_to(shared, (len(own), len(shared)))])
        drafts = np.zeros((len(own), self.cap), np.int32)
        windows = np.minimum(rows.room, self.cap).astype(np.int32)
        text = rows.token_ids, rows.num_tokens, windows
        return drafts, refill(indexes.table.rows, slots, *text, drafts)

    def observe(self, rows: Rows, num_accepted: np.ndarray) -> None:
        """Learn nothing: what was accepted does not change the next draft."""


class Arctic(LockstepDrafter):
    """Suffix decoding of Arctic Inference: one cache per prompt, with the same history.

    Its API adds running responses to the cache. So rows also draft from each other and from their
    own prompt. A draft has at most `ARCTIC_WINDOW` tokens, and each token has at least the default
    minimum probability.
    """

    cap = ARCTIC_WINDOW

    def __init__(self, cache_class: Any) -> None:
        self._class = cache_class

    def begin(self, batch: Batch, ends: np.ndarray) -> None:
        past = {key: group.responses for key, group in batch.history.items()}
        caches = {
            key: arctic.build_cache(self._class, batch.prompts[key], past.get(key, ()))
            for key in dict.fromkeys(batch.keys)
        }
        self._ends, self._caches = ends, [caches[key] for key in batch.keys]
        for row, key in enumerate(batch.keys):
            self._caches[row].start_request(row, batch.prompts[key])

    def draft(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        room = np.minimum(rows.room, self.cap).tolist()
        spans = zip(rows.live.tolist(), rows.token_ids, rows.num_tokens.tolist(), room, strict=True)
        drafted = [
            arctic.draft(self._caches[row], row, tokens[max(0, end - arctic.DEPTH) : end], most)
            if most
            else []
            for row, tokens, end, most in spans
        ]
        return _as_arrays(drafted, self.cap)

    def observe(self, rows: Rows, num_accepted: np.ndarray) -> None:
        after = rows.num_tokens + num_accepted + 1
        spans = zip(rows.live, rows.token_ids, rows.num_tokens, after, strict=True)
        for row, tokens, start, end in spans:
            self._caches[row].add_active_response(int(row), tokens[start:end])
            if end == self._ends[row]:
                self._caches[row].stop_request(int(row))


def index_of(batch: Batch, key: str, config: DraftingConfig, max_draft: int) -> HistoryIndex:
    group = batch.history[key]
    return build_index(
        group.prompt_token_ids,
        group.responses,
        group.rewards,
        turns=group.turns,
        min_match=config.min_match,
        max_match=config.max_match,
        max_draft=max_draft,
    )


def _unrewarded(group: PromptHistory) -> PromptHistory:
    return group._replace(rewards=[0.0] * len(group.rewards))


def _as_arrays(drafted: list[list[int]], cap: int) -> tuple[np.ndarray, np.ndarray]:
    drafts = np.zeros((len(drafted), cap), np.int32)
    for row, tokens in zip(drafts, drafted, strict=True):
        row[: len(tokens)] = tokens
    return drafts, np.fromiter(map(len, drafted), np.int32, len(drafted))
