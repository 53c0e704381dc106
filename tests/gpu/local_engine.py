"""Start, drive and stop engines of refrain from one process, without Ray.

Each engine has an event loop of its own. It runs only while we wait for that engine.
"""

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.store.rows import from_stream
from refrain.schemas.config import EngineConfig, TrainConfig
from refrain.schemas.keys import prompt_key, sample_key
from refrain.schemas.rollout import RequestId, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights
from tests.gpu.models import give_back
from tests.gpu.needs import REHEARSAL

START_S = 300.0 if REHEARSAL else 180.0
"""Longest wait for an engine to start."""
LIMIT_S = 300.0 if REHEARSAL else 60.0
"""Longest wait for anything else that an engine does."""
LOOK_S = 0.05
ENDING_S = 30.0
"""Longest wait for an engine's processes to end."""
T = TypeVar("T")
Row = dict[str, Any]
Rows = dict[tuple[str, int], Row]
"""Finished rollouts by prompt and sample, with the columns of `engines.store.rows`."""


class LocalEngine:
    """An engine with an event loop of its own. `start_s`: seconds that its start took."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine
        self._runner = asyncio.Runner()
        self._num_received = 0
        self._processes: set[multiprocessing.process.BaseProcess] = set()
        self._starting: Future[None] = Future()
        self._late: str = ""

    def start(self) -> None:
        """Begin to start the engine, and return once its process exists.

        `started` waits for the end of the start.
        """
        others = set(multiprocessing.active_children())
        threading.Thread(target=self._start, daemon=True).start()
        while not self._processes and not self._starting.done():
            time.sleep(LOOK_S)
            self._processes = set(multiprocessing.active_children()) - others

    def _start(self) -> None:
        started_s = time.perf_counter()
        try:
            self.wait(self.engine.start(), START_S)
            self.start_s = time.perf_counter() - started_s
        except BaseException as error:
            self._starting.set_exception(error)
        else:
            self._starting.set_result(None)

    def started(self) -> None:
        """Wait until the engine has started. Raise the error of its start if it failed."""
        self._starting.result(START_S)

    def wait(self, doing: Coroutine[Any, Any, T], limit_s: float = LIMIT_S) -> T:
        """Return the result. Once an engine was too late, raise at once: it may hang."""
        if self._late:
            doing.close()
            raise TimeoutError(self._late)
        try:
            return self._runner.run(asyncio.wait_for(doing, limit_s))
        except TimeoutError:
            self._late = f"this engine once took more than {limit_s:.0f} s, in {doing}"
            raise

    def timed(self, doing: Coroutine[Any, Any, T]) -> tuple[T, float]:
        """Return the result, and the seconds that it took."""
        started_s = time.perf_counter()
        return self.wait(doing), time.perf_counter() - started_s

    def roll_out(self, requests: Sequence[RolloutRequest]) -> tuple[Rows, float]:
        """Return the finished rollouts, and the seconds that all of them took."""
        return self.timed(self._roll_out(requests))

    async def _roll_out(self, requests: Sequence[RolloutRequest]) -> Rows:
        await self.engine.submit(requests)
        return await self.finished(len(requests))

    async def finished(self, num: int) -> Rows:
        """Return the next `num` rollouts that finish."""
        rows: Rows = {}
        while len(rows) < num:
            events, told = await self.engine.next_events(self._num_received)
            self._num_received += len(events.finished)
            for row in from_stream(told).to_pylist() if told is not None else ():
                rows[row["prompt_key"], row["sample_index"]] = row
        return rows

    def stop(self) -> None:
        """Stop the engine. Return when its GPUs are free."""
        try:
            if not self._starting.exception(START_S):
                self._runner.run(asyncio.wait_for(self.engine.shutdown(), LIMIT_S))
        finally:
            self._runner.close()
            for process in self._processes:
                process.join(ENDING_S)


@contextmanager
def started(kind: Callable[..., VLLMEngine], config: EngineConfig) -> Iterator[LocalEngine]:
    """Run one engine inside the context."""
    with all_begun([(kind, config)]) as (engine,):
        engine.started()
        yield engine


@contextmanager
def all_begun(
    kinds: Sequence[tuple[Callable[..., VLLMEngine], EngineConfig]],
) -> Iterator[list[LocalEngine]]:
    """Begin to start engines, in parallel: a start mostly uses one core. They end after it."""
    before = dict(os.environ)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    engines = [LocalEngine(kind(0, config)) for kind, config in kinds]
    try:
        for engine in engines:
            # Each process inherits the current environment, and each engine changes it.
            engine.start()
        yield engines
    finally:
        for engine in engines:
            engine.stop()
        os.environ.clear()
        os.environ.update(before)


def train_config(model: Path, directory: Path, prompt_tokens: int, **rollout: Any) -> TrainConfig:
    """Return a run's configuration, for engines and a trainer without the run."""
    response_tokens = rollout.pop("response_tokens")
    dtype = rollout.pop("dtype", "float32" if REHEARSAL else "bfloat16")
    return TrainConfig.model_validate(
        {
            "runs_dir": directory,
            "model": {"path": model, "dtype": dtype},
            "data": {
                "train": ["none"],
                "max_prompt_tokens": prompt_tokens,
                "max_response_tokens": response_tokens,
            },
            # With random weights, rounding differences are large. They are a figure, not a fault.
            "rollout": {"canary_tolerance": 1.0, **rollout},
        }
    )


def policy_weights(config: TrainConfig, canaries: Sequence[Sequence[int]]) -> PolicyWeights:
    """Return the weights of the starting policy, with canaries from the trainer."""
    from refrain.engines.learn.learner import Learner

    learner = Learner(config)
    learner.restore(None)
    weights = PolicyWeights(0, learner.weights_buffer(), learner.canaries(canaries))
    del learner
    give_back()
    return weights


def make_requests(
    num_prompts: int,
    group_size: int,
    prompt_tokens: int,
    response_tokens: int,
    vocab_size: int,
    epoch: int = 1,
) -> list[RolloutRequest]:
    """Return requests with the same prompts in every epoch, but with other noise."""
    rng = np.random.default_rng(0)
    prompts = [
        tuple(rng.integers(2, vocab_size, prompt_tokens).tolist()) for _ in range(num_prompts)
    ]
    return [
        RolloutRequest(
            id=RequestId(Split.TRAIN, epoch, prompt_key(prompt), i),
            prompt_token_ids=prompt,
            sample_key=sample_key(0, epoch, "train", prompt_key(prompt), i),
            max_response_tokens=response_tokens,
        )
        for prompt in prompts
        for i in range(group_size)
    ]


def write_history(directory: Path, rows: Iterable[Row]) -> None:
    """Write an index of each prompt's responses, from which its next ones are drafted."""
    from refrain.engines.histospec.index import build_index
    from refrain.engines.histospec.index_file import index_path, write_index

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["prompt_key"], []).append(row)
    for key, group in groups.items():
        responses = [row["response_token_ids"] for row in group]
        index = build_index(group[0]["prompt_token_ids"], responses, [1.0] * len(group))
        write_index(index, key, index_path(directory, key))


def num_tokens(rows: Rows) -> int:
    return sum(len(row["response_token_ids"]) for row in rows.values())


def parted(rows: Rows, expected: Rows) -> tuple[int, int]:
    """Return how many responses differ from the expected ones, and the tokens compared.

    Count tokens only up to the first difference: all later tokens depend on it. So each response
    has at most one flip.
    """
    num_parted = num = 0
    for id, row in rows.items():
        own, other = row["response_token_ids"], expected[id]["response_token_ids"]
        same = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
        num_parted += same is not None or len(own) != len(other)
        num += min(len(own), len(other)) if same is None else same + 1
    return num_parted, num
