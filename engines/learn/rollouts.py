"""Read rewarded rollouts into arrays, and choose canaries from them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from refrain.engines.learn.packing import TokenSequence
from refrain.engines.store.tables import SPANS, TRAINING, TURNS

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
    """Log-probability of each sampled token, recorded by the rollout engine."""
    versions: NDArray[np.int32]
    """Policy version of each sampled token."""
    reward: float
    group_rewards: NDArray[np.float64]
    """Known rewards of the rollout's group."""
    group_lengths: NDArray[np.int32]
    """Sampled tokens of the responses in `group_rewards`."""
    truncated: bool
    """Whether the response was cut because it had no room left."""
    left_out: bool = False
    """Whether training leaves it out. A failed conversation is not in `group_rewards`."""

    @property
    def group(self) -> tuple[int, str]:
        """Key of the samples that one step planned for one prompt."""
        return self.origin_step, self.prompt_key


def read_rollouts(table: pa.Table) -> list[ScoredRollout]:
    """Return the rollouts of a rewarded batch, sorted by group and sample index. The store has
    checked its rows: rewards are finite, and each sampled token has a log-probability and a
    version."""
    table = table.select(TRAINING.names).cast(TRAINING)
    assert table.num_rows > 0, "the rewarded batch is empty"
    nulls = [name for name in TRAINING.names if table[name].null_count]
    assert not nulls, f"the rewarded batch has nulls in {nulls}"
    table = table.sort_by([(name, "ascending") for name in SORTED_BY])
    rows = zip(*map(_values, table.columns), strict=True)
    return [_rollout(dict(zip(TRAINING.names, row, strict=True))) for row in rows]


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Convert a column to one value per row: lists become arrays, spans the version of each sampled
    token, turns the mask of sampled tokens (None without turns)."""
    array = column.combine_chunks()
    if column.type == TURNS:
        return _masks(array)
    if column.type == SPANS:
        versions, counts = (part.to_numpy() for part in array.flatten().flatten())
        return list(map(np.repeat, _split(versions, array), _split(counts, array)))
    if pa.types.is_large_binary(column.type):
        return array.to_pylist()
    if pa.types.is_list(column.type):
        return _split(array.flatten().to_numpy(zero_copy_only=False), array)
    return array.to_pylist()


def _masks(turns: pa.ListArray) -> list[NDArray[np.bool_] | None]:
    each = turns.flatten()
    counts = [each.field(name).fill_null(0).to_numpy() for name in ("num_sampled", "num_observed")]
    return [_mask(own) if len(own) else None for own in _split(np.stack(counts, axis=1), turns)]


def _mask(counts: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which tokens are sampled. `counts`: [turns, 2], sampled and observed tokens."""
    return np.repeat(np.tile([True, False], len(counts)), counts.ravel())


def _split(values: NDArray, lists: pa.ListArray) -> list[NDArray]:
    return np.split(values, np.cumsum(lists.value_lengths().to_numpy())[:-1])


def _rollout(row: dict[str, Any]) -> ScoredRollout:
    prompt, response = row.pop("prompt_token_ids"), row.pop("response_token_ids")
    rollout = ScoredRollout(
        token_ids=np.concatenate([prompt, response]),
        num_prompt_tokens=len(prompt),
        sampled=row.pop("turns"),
        versions=row.pop("version_spans"),
        **row,
    )
    name = f"sample {rollout.sample_index} of prompt {rollout.prompt_key}"
    num_tokens, num_logprobs = rollout.num_response_tokens, len(rollout.inference_logprobs)
    assert len(prompt) > 0, f"{name} has no prompt"
    masked = rollout.sampled is None or len(rollout.sampled) == len(response)
    assert masked, f"{name}: its turns do not cover its {len(response)} tokens"
    assert num_tokens == num_logprobs == len(rollout.versions) > 0, f"{name}: {num_tokens} tokens"
    group = zip(rollout.group_rewards, rollout.group_lengths, strict=True)
    known = rollout.left_out or (rollout.reward, num_tokens) in group
    assert known, f"{name} is not in its group"
    return rollout


def choose_canaries(rollouts: Iterable[ScoredRollout]) -> list[list[int]]:
    """Return beginnings of rollouts of different prompts, whose scores the engines must
    reproduce."""
    firsts: dict[str, ScoredRollout] = {}
    for rollout in rollouts:
        firsts.setdefault(rollout.prompt_key, rollout)
    chosen = islice(firsts.values(), NUM_CANARIES)
    return [rollout.token_ids[:MAX_CANARY_TOKENS].tolist() for rollout in chosen]
