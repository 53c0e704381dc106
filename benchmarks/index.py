"""The history index: how fast it is built and drafts, and its size.

    python benchmarks/index.py [--json FILE]

One prompt with 16 responses of 16k tokens, each made from the one before by copying spans and
changing tokens, as successive samples of one prompt repeat each other. One core, medians;
compilation is left out. About ten seconds.
"""

import argparse
import json
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np

from engines.histospec.drafting import IndexTable, draft_batch
from engines.histospec.index import build_index

NUM_RESPONSES, RESPONSE_TOKENS, VOCAB_SIZE = 16, 16_384, 32_000
ROWS, WINDOW, REPEATS = 256, 8, 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="Write the figures here.")
    args = parser.parse_args()
    responses = similar_responses(np.random.default_rng(0))
    contexts = contexts_of(responses, np.random.default_rng(1))
    ours = Ours(responses, contexts)
    rows = [{"build_s": ours.build(), "draft_s": ours.draft()} for _ in range(REPEATS)]
    num_tokens = NUM_RESPONSES * RESPONSE_TOKENS
    figures = {
        "build_tokens_per_s": num_tokens / median(row["build_s"] for row in rows),
        "draft_256_rows_ms": 1e3 * median(row["draft_s"] for row in rows),
        "bytes_per_token": ours.num_bytes / num_tokens,
    }
    for name, value in figures.items():
        print(f"{name:>28}  {value:,.3f}")
    if args.json:
        report = {
            "name": "index",
            "figures": figures,
            "rows": rows,
            "command": shlex.join(["python", *sys.argv]),
            "versions": {package: version(package) for package in ("numba", "numpy")},
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def similar_responses(rng: np.random.Generator) -> list[np.ndarray]:
    """Each has about 70 % of its tokens in spans of the one before."""
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
    """int32 [ROWS, 64]: half of them end inside a response, half in a token that is new there."""
    rows = np.empty((ROWS, 64), np.int32)
    for i in range(ROWS):
        response = responses[int(rng.integers(NUM_RESPONSES))]
        start = int(rng.integers(0, RESPONSE_TOKENS - 96))
        rows[i] = response[start : start + 64]
        if i % 2:
            rows[i, -1] = rng.integers(0, VOCAB_SIZE)
    return rows


class Ours:
    def __init__(self, responses: list[np.ndarray], contexts: np.ndarray) -> None:
        self._responses, self._contexts = responses, contexts
        self._rewards = [float(i % 2) for i in range(len(responses))]
        self._index = build_index([], responses, self._rewards)
        self.num_bytes = self._index.num_bytes
        self._table = IndexTable()
        self._slots = np.full(ROWS, self._table.add(self._index), np.int32)

    def build(self) -> float:
        started_s = time.perf_counter()
        build_index([], self._responses, self._rewards)
        return time.perf_counter() - started_s

    def draft(self) -> float:
        lengths, windows = np.full(ROWS, 64, np.int32), np.full(ROWS, WINDOW, np.int32)
        drafts = np.zeros((ROWS, WINDOW), np.int32)
        started_s = time.perf_counter()
        draft_batch(self._table.rows, self._slots, self._contexts, lengths, windows, drafts)
        return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
