"""Score responses: a finite number for each, or the outcome that `reward.on_error` sets.

Both a user's function and the built-in scorers run in separate processes (`process.py`), so that a
call that hangs can be killed.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from refrain.engines.answers import builtin
from refrain.engines.answers.builtin import accepted_answers, builtin_scorer
from refrain.engines.reward.process import CallError, Failed, Outcome, ScorerProcess
from refrain.engines.reward.results import Scored
from refrain.engines.reward.worker import ARGUMENTS, GROUP_ARGUMENTS, Call
from refrain.schemas.reward import BuiltinReward, FunctionReward, RewardConfig

MAX_CALLS_PER_CHUNK = 32
"""Calls sent to one process at once. An async function runs them concurrently."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
MAX_RETRIES = 8
"""Times that `on_error: retry` scores a response again: about two minutes of waits in all."""
"""First and longest wait before a retry. Each wait is twice the one before."""
BUILTIN_MEMORY_BYTES = 2**32
"""Memory limit of a process that runs a built-in scorer."""
ERROR, NUM_RETRIES = "error", "num_retries"
"""Names of extra values: why a response has no score, and the number of its retries."""

MAX_RESPONSE_CHARACTERS_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Response:
    """One response to score, with its prompt's fields of the data set."""

    prompt_key: str
    sample_index: int
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


Group = Sequence[Response]
"""Responses that one call scores: a single one, or all of a prompt (`reward.group`)."""


def check_reward_file(config: RewardConfig) -> None:
    """Raise ValueError if the user's file does not exist. `check_reward` also loads the file."""
    if isinstance(config, FunctionReward) and not config.path.is_file():
        raise ValueError(
            f"reward.path: there is no file {config.path}. Set it to the Python file that defines "
            f"{config.function}."
        )


def check_reward(
    config: RewardConfig,
    data_sources: Iterable[str],
    surroundings: Mapping[str, str] | None = None,
) -> None:
    """Raise ValueError if a data source has no scorer, or if the user's function cannot be used.

    Call this before anything expensive starts. `surroundings`: see `ScorerProcess`.
    """
    if isinstance(config, BuiltinReward):
        for data_source in sorted(data_sources):
            builtin_scorer(data_source)
    if not isinstance(config, FunctionReward):
        return
    check_reward_file(config)
    process = ScorerProcess(config, surroundings)
    try:
        process.start()
    finally:
        process.close()


def check_ground_truth(config: RewardConfig, ground_truth: Any) -> None:
    """Raise ValueError if a built-in scorer cannot compare with this ground truth. A user's
    function or environment may take any ground truth."""
    if isinstance(config, BuiltinReward):
        accepted_answers(ground_truth)


class Scorer:
    """Scorer with one configured reward. Its processes end with this process."""

    def __init__(
        self,
        config: BuiltinReward | FunctionReward,
        num_processes: int = 1,
        surroundings: Mapping[str, str] | None = None,
    ) -> None:
        """`num_processes`: number of concurrent calls of a plain function. An async function runs
        up to 32 times as many. `surroundings`: see `ScorerProcess`."""
        self._config = as_function(config)
        self.processes = [ScorerProcess(self._config, surroundings) for _ in range(num_processes)]

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """Return the score and extra values of each response, in order. With `reward.group`, the
        responses of a prompt lie side by side.

        Raises ValueError for the first response without a score, unless `reward.on_error` allows
        it.
        """
        idle: SimpleQueue[ScorerProcess] = SimpleQueue()
        for process in self.processes:
            idle.put(process)

        def score(chunk: Sequence[Group]) -> list[Scored]:
            process = idle.get()
            try:
                return _score_chunk(process, chunk, self._config)
            finally:
                idle.put(process)

        pool = ThreadPoolExecutor(len(self.processes))
        try:
            chunks = _chunks(_groups(responses, self._config), len(self.processes))
            return [scored for scores in pool.map(score, chunks) for scored in scores]
        finally:
            # After an error, drop the chunks that have not begun.
            pool.shutdown(cancel_futures=True)

    @property
    def num_scored(self) -> int:
        """Number of calls that have finished so far."""
        return sum(process.num_scored for process in self.processes)


def as_function(config: BuiltinReward | FunctionReward) -> FunctionReward:
    """Return the reward as a function. A built-in scorer becomes a function too, because a
    comparison of answers may not end; such a response gets 0."""
    if isinstance(config, FunctionReward):
        return config
    return FunctionReward(
        path=Path(builtin.__file__),
        timeout_s=config.timeout_s,
        on_error="zero",
        max_memory_bytes=BUILTIN_MEMORY_BYTES,
    )


def _groups(responses: Sequence[Response], config: FunctionReward) -> list[Group]:
    if not config.group:
        return [(response,) for response in responses]
    return [tuple(own) for _, own in groupby(responses, lambda response: response.prompt_key)]


def _chunks(groups: Sequence[Group], num_processes: int) -> list[Sequence[Group]]:
    size = min(MAX_CALLS_PER_CHUNK, -(-len(groups) // num_processes)) or 1
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def _score_chunk(
    process: ScorerProcess, chunk: Sequence[Group], config: FunctionReward
) -> list[Scored]:
    calls = [_call(group, config) for group in chunk]
    scored: dict[int, list[Scored]] = {}
    num_failures: Counter[int] = Counter()
    while waiting := [index for index in range(len(calls)) if index not in scored]:
        if failed := max(num_failures[index] for index in waiting):
            time.sleep(min(FIRST_WAIT_S * 2 ** (failed - 1), LONGEST_WAIT_S))
        for index, outcome in _outcomes(process, calls, waiting, chunk):
            if isinstance(outcome, Failed):
                num_failures[index] += 1
                if config.on_error == "zero":
                    scored[index] = [unscored(outcome.reason)] * len(chunk[index])
                elif num_failures[index] > MAX_RETRIES:
                    tries = f"{num_failures[index]} tries, the last one: {outcome.reason}"
                    raise ValueError(_describe(chunk[index], tries))
            elif outcome:
                own = outcome if isinstance(outcome, list) else [outcome]
                retried = {NUM_RETRIES: num_failures[index]} if num_failures[index] else {}
                scored[index] = [(score, extra | retried) for score, extra in own]
    return [one for index in range(len(calls)) for one in scored[index]]


def unscored(reason: str) -> Scored:
    """Return the reward of a response that got no score."""
    return 0.0, {"pred": None, ERROR: reason}


def _call(group: Group, config: FunctionReward) -> Call:
    if not config.group:
        (response,) = group
        return {name: getattr(response, name) for name in ARGUMENTS}
    names = zip(GROUP_ARGUMENTS, ARGUMENTS, strict=True)
    return {plural: [getattr(response, name) for response in group] for plural, name in names}


def _outcomes(
    process: ScorerProcess,
    calls: Sequence[Call],
    waiting: Sequence[int],
    chunk: Sequence[Group],
) -> list[tuple[int, Outcome | None]]:
    try:
        outcomes = process.score([calls[index] for index in waiting])
    except CallError as error:
        raise ValueError(_describe(chunk[waiting[error.index]], error.reason)) from error
    return list(zip(waiting, outcomes, strict=True))


def _describe(group: Group, reason: str) -> str:
    first = group[0]
    samples = ", ".join(str(response.sample_index) for response in group)
    return (
        f"no reward for sample{'s'[: len(group) - 1]} {samples} of prompt {first.prompt_key} "
        f"(data_source {first.data_source!r}): {reason}\n"
        f"The {'first ' * (len(group) > 1)}response begins: "
        f"{first.solution_str[:MAX_RESPONSE_CHARACTERS_SHOWN]!r}"
    )
