"""A round of a draft model after short and long texts: does it cost the same?

A round is what one verification requires of live sequences (`engines.inference.drafting.live`).
They receive a verified window with another last token, go back to it, and draft the next window
token by token. Every second sequence takes part, so each one pauses and returns to the batch. Both
lengths run in one process, in turn. The bench counts the bytes that are received and sent, and the
tokens that are hashed. It times the round, and the part of it outside the model's own pass.
Attention reads the whole context, as in every engine. Nothing else may grow with it.

CONFIG names a draft model. Its positions are extended to the longer text, as its tokens do not
matter.
"""

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import one_step
from benchmarks.laps import Measured, Row, check_counts, rows_with
from engines.actors import RemoteActor
from engines.gpus.placement import Wanted
from engines.inference.drafting.draft_link import Feedback, encode
from engines.inference.drafting.vllm_drafter import VLLMDrafter
from engines.reports.tables import plain_table
from engines.specactor.streams import Opened, Verified
from flows.config_file import load_config
from schemas.bench import BenchReport
from schemas.drafting import DrafterConfig
from tasks.run.ray_cluster import ray_cluster

PACKAGES = one_step.PACKAGES
CONTEXTS = {"1k": 1024, "16k": 16 * 1024}
"""Tokens of the texts, by name."""
_VERIFIER = b"bench"
_START_S, _MEASURE_S = 300.0, 1200.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", type=Path, default=Path("infra/demo/decoupled.yaml")
    )
    parser.add_argument(
        "--sequences", type=int, default=16, metavar="N", help="live sequences [default: 16]"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=40,
        metavar="N",
        help="rounds for each length of text [default: 40]",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=4,
        metavar="W",
        help="draft tokens per verification [default: 4]",
    )


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "sequences", "rounds", "window")
    processes = load_config(args.config).engine.drafter_processes
    if not processes:
        raise ValueError(f"{args.config} names no draft model: add specactor.draft_models")
    longest = max(CONTEXTS.values()) + (args.rounds + 2) * args.window
    changes = {
        "max_model_len": longest,
        "max_num_seqs": 2 * args.sequences,
        "max_live": 2 * args.sequences,
    }
    rows = asyncio.run(_measure(processes[0].model_copy(update=changes), args, console))
    figures: dict[str, int | float] = {}
    for name, context in CONTEXTS.items():
        for column, unit in (("seconds", "ms"), ("beside_model_s", "ms"), ("cpu_s", "ms")):
            of_context = [row[column] for row in rows_with(rows, context_tokens=context)]
            figures[f"{column.removesuffix('_s')}_{name}_{unit}"] = 1e3 * median(of_context)
        for column in ("num_bytes", "num_hashed_tokens"):
            of_context = [row[column] for row in rows_with(rows, context_tokens=context)]
            figures[f"{column}_{name}"] = max(of_context)
    return figures, rows


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("context", "round", "beside the model", "bytes", "tokens hashed", text=())
    for name, context in CONTEXTS.items():
        figures = {key.replace(f"_{name}", ""): value for key, value in report.figures.items()}
        table.add_row(
            f"{context:,}",
            f"{figures['seconds_ms']:.2f} ms",
            f"{figures['beside_model_ms']:.2f} ms",
            f"{figures['num_bytes']:,}",
            f"{figures['num_hashed_tokens']:,}",
        )
    console.print(table)


async def _measure(config: DrafterConfig, args: Namespace, console: Console) -> list[Row]:
    wanted = [Wanted("a drafter", 1, "a drafter")]
    with ray_cluster("bench", wanted) as placement:
        num_gpus = 1 if placement.num_gpus else 0
        actor = RemoteActor("drafter", RoundDrafter, config, num_gpus=num_gpus)
        try:
            await actor.call("start", timeout_s=_START_S)
            console.print("texts are computed first; the longer one takes a minute on a CPU")
            return await actor.call(
                "rounds", args.sequences, args.window, args.rounds, timeout_s=_MEASURE_S
            )
        finally:
            await actor.stop()


class RoundDrafter(VLLMDrafter):
    """A drafter that is its own verifier."""

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        positions = {"max_position_embeddings": self._config.max_model_len}
        return super()._engine_args(on_cpu) | {"hf_overrides": positions}

    async def rounds(self, num_sequences: int, window: int, num_rounds: int) -> list[Row]:
        """Return the rows of all rounds, without the first ones of each length."""
        return await self._in_thread(partial(self._rounds, num_sequences, window, num_rounds))

    def _rounds(self, num_sequences: int, window: int, num_rounds: int) -> list[Row]:
        self._socket.close()
        self._num_bytes, self._model_s, self._socket = 0, 0.0, _Counter(self)
        self._time_model()
        streams = {
            context: [f"{context}/{i}" for i in range(num_sequences)]
            for context in CONTEXTS.values()
        }
        for context, ids in streams.items():
            text = [3 + i * i % 31 for i in range(context)]
            # The first sequence computes the text; the others find it in the prefix cache.
            for some in (ids[:1], ids[1:]):
                self._receive(_VERIFIER, encode(Feedback(opened=[
                    Opened(id, text, i, window, True, self._config.max_model_len)
                    for i, id in enumerate(some)
                ])))  # fmt: skip
                self._draft_all()
        rows = []
        for index in range(num_rounds + 2):
            for context, ids in streams.items():
                row = self._round(ids[index % 2 :: 2])
                rows += [{"context_tokens": context, **row}] if index > 1 else []
        return rows

    def _round(self, ids: Sequence[str]) -> Row:
        told = [self._verified(id) for id in ids]
        message = encode(Feedback(verified=told))
        hashed = self._num_hashed()
        self._num_bytes, self._model_s = len(message), 0.0
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        self._receive(_VERIFIER, message)
        self._draft_all()
        seconds = time.perf_counter() - started_s
        return {
            "seconds": seconds,
            "cpu_s": time.thread_time() - started_cpu_s,
            "beside_model_s": seconds - self._model_s,
            "num_bytes": self._num_bytes,
            "num_hashed_tokens": self._num_hashed() - hashed,
        }

    def _verified(self, id: str) -> Verified:
        """Return a window of which all tokens but the last were right."""
        stream = self._streams[_VERIFIER, id]
        *right, wrong = stream.ahead
        return Verified(id, stream.num_verified, [*right, 3 + (wrong - 2) % 31])

    def _draft_all(self) -> None:
        while self._wanting:
            self._draft()

    def _num_hashed(self) -> int:
        scheduler = self._live._scheduler
        num_blocks = sum(len(request.block_hashes) for request in scheduler.requests.values())
        return num_blocks * scheduler.hash_block_size

    def _time_model(self) -> None:
        runner = self._live._runner
        forward = runner._model_forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._in_model():
                return forward(*args, **kwargs)

        runner._model_forward = timed

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._model_s += time.perf_counter() - started_s


class _Counter:
    """A socket that counts the bytes it sends."""

    def __init__(self, drafter: RoundDrafter) -> None:
        self._drafter = drafter

    def poll(self, timeout_ms: int) -> bool:
        time.sleep(timeout_ms / 1000)
        return False

    def send_multipart(self, parts: Sequence[bytes]) -> None:
        self._drafter._num_bytes += sum(map(len, parts))

    def close(self) -> None:
        pass
