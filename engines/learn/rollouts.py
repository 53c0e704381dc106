"""Read rewarded rollouts into arrays, and choose canaries from them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engines.learn.packing import TokenSequence
from engines.store.tables import SPANS, TRAINING

SORTED_BY = ("origin_step", "prompt_key", "sample_index")

NUM_CANARIES = 3
MAX_CANARY_TOKENS = 128


@dataclass(frozen=True, slots=True)
class ScoredRollout(TokenSequence):
    """One row of a rewarded batch. Fields have the names of its columns."""

    origin_step: int
    prompt_key: str
    sample_index: int
    inference_logprobs: NDArray[np.float32]
    """Log-probability of each response token, recorded by the rollout engine."""
    versions: NDArray[np.int32]
    """Policy version of each response token."""
    reward: float
    group_rewards: NDArray[np.float64]
    """Known rewards of the rollout's group."""
    group_lengths: NDArray[np.int32]
    """Response tokens of the samples in `group_rewards`."""
    truncated: bool
    """Whether the response was cut at its maximum length."""

    @property
    def group(self) -> tuple[int, str]:
        """Key of the samples that one step planned for one prompt."""
        return self.origin_step, self.prompt_key


def read_rollouts(table: pa.Table) -> list[ScoredRollout]:
    """Return the rollouts of a rewarded batch, sorted by group and sample index.

    Raises ValueError when a column is missing or has another type, a value is null, or the table, a
    prompt or a response is empty. Raises it too when the numbers of tokens, log-probabilities and
    policy versions differ, a reward is not finite, or a group lacks its own sample.
    """
    missing = [name for name in TRAINING.names if name not in table.column_names]
    if missing:
        raise ValueError(f"the rewarded batch lacks {missing}; it has {table.column_names}")
    table = table.select(TRAINING.names).cast(TRAINING)
    nulls = [name for name in TRAINING.names if table[name].null_count]
    if nulls or table.num_rows == 0:
        raise ValueError(f"the rewarded batch has {table.num_rows} rows and nulls in {nulls}")
    table = table.sort_by([(name, "ascending") for name in SORTED_BY])
    rows = zip(*map(_values, table.columns), strict=True)
    return [_rollout(dict(zip(TRAINING.names, row, strict=True))) for row in rows]


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Convert a column to one value per row: lists become arrays, spans the version of each
    token."""
    array = column.combine_chunks()
    if column.type == SPANS:
        versions, counts = (part.to_numpy() for part in array.flatten().flatten())
        return list(map(np.repeat, _split(versions, array), _split(counts, array)))
    if pa.types.is_list(column.type):
        return _split(array.flatten().to_numpy(zero_copy_only=False), array)
    return array.to_pylist()


def _split(values: NDArray, lists: pa.ListArray) -> list[NDArray]:
    return np.split(values, np.cumsum(lists.value_lengths().to_numpy())[:-1])


def _rollout(row: dict[str, Any]) -> ScoredRollout:
    prompt, response = row.pop("prompt_token_ids"), row.pop("response_token_ids")
    rollout = ScoredRollout(
        token_ids=np.concatenate([prompt, response]),
        num_prompt_tokens=len(prompt),
        versions=row.pop("version_spans"),
        **row,
    )
    _check_lengths(rollout)
    _check_group(rollout)
    return rollout


def _check_lengths(rollout: ScoredRollout) -> None:
    num_prompt, num_response = rollout.num_prompt_tokens, rollout.num_response_tokens
    num_logprobs, num_versions = len(rollout.inference_logprobs), len(rollout.versions)
    if num_prompt == 0 or num_response == 0 or not num_logprobs == num_versions == num_response:
        raise ValueError(
            f"a rollout of prompt {rollout.prompt_key} has {num_prompt} prompt "
            f"tokens, {num_response} response tokens and {num_logprobs} log-probabilities and "
            f"{num_versions} policy versions for them: prompt and response need at least one "
            "token, and each response token needs a log-probability and a version"
        )


def _check_group(rollout: ScoredRollout) -> None:
    own = (rollout.reward, rollout.num_response_tokens)
    rewards, lengths = rollout.group_rewards, rollout.group_lengths
    name = f"response {rollout.sample_index} of prompt {rollout.prompt_key}"
    if not np.isfinite([own[0], *rewards]).all():
        raise ValueError(
            f"the reward of {name} is {own[0]}, those of its group are {rewards.tolist()}: a "
            "scorer must return finite numbers"
        )
    if len(rewards) != len(lengths) or own not in zip(rewards, lengths, strict=True):
        raise ValueError(
            f"{name} has reward {own[0]} and {own[1]} tokens, which is not among group_rewards "
            f"{rewards.tolist()} with group_lengths {lengths.tolist()}"
        )


def choose_canaries(rollouts: Iterable[ScoredRollout]) -> list[list[int]]:
    """Return beginnings of rollouts of different prompts, whose scores the engines must
    reproduce."""
    firsts: dict[str, ScoredRollout] = {}
    for rollout in rollouts:
        firsts.setdefault(rollout.prompt_key, rollout)
    chosen = islice(firsts.values(), NUM_CANARIES)
    return [rollout.token_ids[:MAX_CANARY_TOKENS].tolist() for rollout in chosen]
