"""Compare the history index with Arctic Inference's suffix trees: build time, size, drafts.

The data is one prompt with 16 responses of 16k tokens. Each response copies spans of the one before
and changes tokens, as successive samples of one prompt repeat each other. Both subjects run in turn
on one core. Figures are medians, without compilation. Arctic Inference is fed as its API demands: a
response extends the tree that all requests share and the tree of its own request. Its bytes are its
own estimate for the shared tree; the growth of the process agrees within a few percent.

"refrain, shared" drafts all rows first from the prompt's index, then from a full index that all
prompts share (`DraftingConfig.shared_tokens`: 1 M tokens). Its build time is that of one of the
index's files.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from refrain.benchmarks.arctic import PACKAGE, build_cache, draft, find_cache_class
from refrain.benchmarks.laps import Measured, Row, check_counts, median_of, rows_with
from refrain.engines.histospec.drafting import (
    draft_batch,
    draft_batch_of_any,
    evidence_shares,
    without_turns,
)
from refrain.engines.histospec.index import HistoryIndex, build_index
from refrain.engines.histospec.library import index_sizes
from refrain.engines.histospec.matching import IndexTable
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport
from refrain.schemas.drafting import DraftingConfig

NUM_RESPONSES, RESPONSE_TOKENS, VOCAB_SIZE = 16, 16_384, 32_000
ROWS, CONTEXT_TOKENS, WINDOW = 256, 64, 8
SIZES = index_sizes(DraftingConfig())
SHARED_FILES, SHARED_PROMPTS = 4, 1
"""Files of the full shared index, and prompts in each file."""
FIGURES = ("build_tokens_per_s", "bytes_per_token", "draft_256_rows_ms")
PACKAGES = ("refrain-rl", "numba", "numpy", PACKAGE)
PREFIXES = {"refrain": "", "refrain, shared": "shared_", "arctic": "arctic_"}
"""Prefix of the figures of each index."""
_NO_PROMPT = np.empty(0, np.int32)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="[default: 7]")


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "repeats")
    responses = similar_responses(np.random.default_rng(0))
    contexts = contexts_of(responses, np.random.default_rng(1))
    subjects: dict[str, Any] = {
        "refrain": Ours(responses, contexts),
        "refrain, shared": SharedByAll(responses, contexts),
    }
    if cache_class := find_cache_class():
        subjects["arctic"] = ArcticTrees(cache_class, responses, contexts)
    repeats = track(range(args.repeats), "index", console=console, transient=True)
    rows = [
        {"index": name, "repeat": i, "build_s": seconds(it.build), "draft_s": seconds(it.draft)}
        for i in repeats
        for name, it in subjects.items()
    ]
    figures: dict[str, float] = {}
    for name, subject in subjects.items():
        values = _figures(subject.num_tokens, subject.num_bytes, rows_with(rows, index=name))
        figures |= {f"{PREFIXES[name]}{key}": value for key, value in values.items()}
    return figures, rows


def show(report: BenchReport, console: Console) -> None:
    columns = ("index", "build tokens/s", "bytes/token", f"{ROWS} drafts, ms")
    table = plain_table(*columns, text=("index",))
    for name, prefix in PREFIXES.items():
        values = [report.figures.get(f"{prefix}{figure}") for figure in FIGURES]
        known = [f"{v:,.{d}f}" for v, d in zip(values, (0, 1, 3), strict=True) if v is not None]
        table.add_row(name, *(known or [f"{PACKAGE} is not installed"]))
    console.print(table)


def seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _figures(num_tokens: int, num_bytes: int, rows: list[Row]) -> dict[str, float]:
    build_s, draft_s = median_of(rows, "build_s"), median_of(rows, "draft_s")
    values = (num_tokens / build_s, num_bytes / num_tokens, 1e3 * draft_s)
    return dict(zip(FIGURES, values, strict=True))


def similar_responses(rng: np.random.Generator) -> list[np.ndarray]:
    """Return responses that have about 70 % of their tokens in spans of the one before."""
    responses = [rng.integers(0, VOCAB_SIZE, RESPONSE_TOKENS, dtype=np.int32)]
    while len(responses) < NUM_RESPONSES:
        parts, size = [], 0
        while size < RESPONSE_TOKENS:
            start = int(rng.integers(0, RESPONSE_TOKENS - 64))
            span = responses[-1][start : start + int(rng.geometric(1 / 24))]
            fresh = rng.integers(0, VOCAB_SIZE, int(rng.geometric(1 / 10)), dtype=np.int32)
            parts += [span, fresh]
            size += len(span) + len(fresh)
        responses.append(np.concatenate(parts)[:RESPONSE_TOKENS])
    return responses


def contexts_of(responses: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Return int32 [ROWS, 64]: half of the rows end inside a response, half in a token that is new
    there."""
    rows = np.empty((ROWS, CONTEXT_TOKENS), np.int32)
    for i in range(ROWS):
        response = responses[int(rng.integers(NUM_RESPONSES))]
        start = int(rng.integers(0, RESPONSE_TOKENS - 96))
        rows[i] = response[start : start + CONTEXT_TOKENS]
        if i % 2:
            rows[i, -1] = rng.integers(0, VOCAB_SIZE)
    return rows


class Ours:
    def __init__(self, responses: list[np.ndarray], contexts: np.ndarray) -> None:
        self.num_tokens = sum(map(len, responses))
        self._responses = responses
        self._rewards = [float(i % 2) for i in range(len(responses))]
        self.index = self.build()
        self.num_bytes = self.index.num_bytes
        self._table = IndexTable()
        slots = np.full(ROWS, self._table.add(self.index), np.int32)
        lengths, windows = np.full(ROWS, CONTEXT_TOKENS, np.int32), np.full(ROWS, WINDOW, np.int32)
        drafts, evidence = np.zeros((ROWS, WINDOW), np.int32), np.zeros((ROWS, WINDOW), np.uint16)
        rows = (contexts, lengths, windows, np.arange(ROWS, dtype=np.int64), without_turns(ROWS))
        self._batch = (slots, *rows, evidence_shares(), drafts, evidence)

    def build(self) -> HistoryIndex:
        return build_index([], self._responses, self._rewards, **SIZES)

    def draft(self) -> None:
        draft_batch(self._table.rows, *self._batch)


class SharedByAll(Ours):
    """A shared index with several files. One file has the prompt's responses among others."""

    def __init__(self, responses: list[np.ndarray], contexts: np.ndarray) -> None:
        super().__init__(responses, contexts)
        files = []
        for file in range(SHARED_FILES):
            rngs = [np.random.default_rng([file, prompt]) for prompt in range(SHARED_PROMPTS)]
            prompts = [similar_responses(rng) for rng in rngs]
            if file == 0:
                prompts[0] = responses
            self._responses = list(chain.from_iterable(prompts))
            self._rewards = [float(i % 2) for i in range(len(self._responses))]
            files.append(index := self.build())
        self.num_tokens, self.num_bytes = SHARED_PROMPTS * self.num_tokens, index.num_bytes
        files = [self._table.add(index) for index in files]
        self._slots = np.array(files, np.int32)

    def draft(self) -> None:
        super().draft()
        *rows, _, drafts, evidence = self._batch[1:]
        draft_batch_of_any(self._table.rows, self._slots, *rows, drafts, evidence)


class ArcticTrees:
    """Arctic Inference with one call per row, as its API has it, and its default minimum
    probability."""

    def __init__(self, cache_class: Any, responses: list[np.ndarray], contexts: np.ndarray) -> None:
        self.num_tokens = sum(map(len, responses))
        self._class, self._responses, self._contexts = cache_class, responses, contexts
        self._cache = self.build()
        self.num_bytes = self._cache._global_tree.estimate_memory()
        for row in range(ROWS):
            self._cache.start_request(row, _NO_PROMPT)

    def build(self) -> Any:
        return build_cache(self._class, _NO_PROMPT, self._responses)

    def draft(self) -> None:
        for row, context in enumerate(self._contexts):
            draft(self._cache, row, context, WINDOW)
