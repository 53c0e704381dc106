"""Scoring responses: a finite number for each, or an error that names the response.

Built-in scorers run in place. A user's function runs in processes of its own (`process.py`), where
one that hangs is killed. Nothing is scored 0 because something went wrong.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from engines.reward.builtin import accepted_answers, builtin_scorer
from engines.reward.process import CallError, Scored, ScorerProcess
from engines.reward.worker import ARGUMENTS, checked_score
from schemas.reward import BuiltinReward, FunctionReward

MAX_CALLS_PER_CHUNK = 32
"""Responses given to one process at once; an async function scores them concurrently."""

MAX_RESPONSE_CHARACTERS_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Response:
    """One response to score, with what the data set says about its prompt."""

    prompt_key: str
    sample_index: int
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


def check_reward_file(config: BuiltinReward | FunctionReward) -> None:
    """Raises ValueError when the user's file is not there; `check_reward` tries to use it."""
    if isinstance(config, FunctionReward) and not config.path.is_file():
        raise ValueError(
            f"reward.path: there is no file {config.path}: give the Python file that defines "
            f"{config.function}"
        )


def check_reward(config: BuiltinReward | FunctionReward, data_sources: Iterable[str]) -> None:
    """Check of the scorers, to be called before anything expensive starts.

    Raises ValueError when a data source has no scorer or the user's function cannot be used.
    """
    if isinstance(config, BuiltinReward):
        for data_source in sorted(data_sources):
            builtin_scorer(data_source)
        return
    check_reward_file(config)
    process = ScorerProcess(config)
    try:
        process.start()
    finally:
        process.close()


def check_ground_truth(config: BuiltinReward | FunctionReward, ground_truth: Any) -> None:
    """Raises ValueError for a ground truth that a built-in scorer cannot compare with; a user's
    function knows its own."""
    if isinstance(config, BuiltinReward):
        accepted_answers(ground_truth)


class Scorer:
    """Scores responses with one configured reward. Processes that it starts end with this one."""

    def __init__(self, config: BuiltinReward | FunctionReward, num_processes: int = 1) -> None:
        """`num_processes` is how many calls of a user's plain function run at once; an async one
        runs up to 32 times as many."""
        self._config = config
        self._num_in_place = 0
        self.processes: list[ScorerProcess] = []
        if isinstance(config, FunctionReward):
            self.processes = [ScorerProcess(config) for _ in range(num_processes)]

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """Score and extra values of each response, in order.

        Raises ValueError for the first whose scorer fails, returns no finite number or takes
        longer than `timeout_s` seconds.
        """
        if isinstance(self._config, BuiltinReward):
            return [self._score_in_place(response) for response in responses]
        return self._score_by_processes(responses)

    @property
    def num_scored(self) -> int:
        """Responses that were scored so far."""
        return self._num_in_place + sum(process.num_scored for process in self.processes)

    def _score_in_place(self, response: Response) -> Scored:
        scored = _score_builtin(response)
        self._num_in_place += 1
        return scored

    def _score_by_processes(self, responses: Sequence[Response]) -> list[Scored]:
        idle: SimpleQueue[ScorerProcess] = SimpleQueue()
        for process in self.processes:
            idle.put(process)

        def score(chunk: Sequence[Response]) -> list[Scored]:
            process = idle.get()
            try:
                return _score_chunk(process, chunk)
            finally:
                idle.put(process)

        pool = ThreadPoolExecutor(len(self.processes))
        try:
            chunks = _chunks(responses, len(self.processes))
            return [scored for scores in pool.map(score, chunks) for scored in scores]
        finally:
            # After an error the chunks that have not begun are dropped.
            pool.shutdown(cancel_futures=True)


def _chunks(responses: Sequence[Response], num_processes: int) -> list[Sequence[Response]]:
    size = min(MAX_CALLS_PER_CHUNK, -(-len(responses) // num_processes)) or 1
    return [responses[start : start + size] for start in range(0, len(responses), size)]


def _score_builtin(response: Response) -> Scored:
    score = builtin_scorer(response.data_source)
    try:
        return checked_score(score(response.solution_str, response.ground_truth))
    except Exception as error:
        raise ValueError(_describe(response, f"{type(error).__name__}: {error}")) from error


def _score_chunk(process: ScorerProcess, chunk: Sequence[Response]) -> list[Scored]:
    calls = [{name: getattr(response, name) for name in ARGUMENTS} for response in chunk]
    try:
        return process.score(calls)
    except CallError as error:
        raise ValueError(_describe(chunk[error.index], error.reason)) from error


def _describe(response: Response, reason: str) -> str:
    return (
        f"no reward for sample {response.sample_index} of prompt {response.prompt_key} "
        f"(data_source {response.data_source!r}): {reason}\n"
        f"The response begins: {response.solution_str[:MAX_RESPONSE_CHARACTERS_SHOWN]!r}"
    )
