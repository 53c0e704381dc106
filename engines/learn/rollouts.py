"""Rewarded rollouts as arrays, and who trains on which of them when."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SCHEMA = pa.schema(
    [
        ("prompt_key", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("response_token_ids", pa.list_(pa.int32())),
        ("inference_logprobs", pa.list_(pa.float32())),
        ("reward", pa.float64()),
    ]
)
"""A rewarded batch: one row per rollout. `inference_logprobs` are under softmax(logits / T)."""

NUM_CANARIES = 3
MAX_CANARY_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The columns of a rewarded batch, sorted by prompt key and sample index."""

    prompt_keys: list[str]
    prompts: list[NDArray[np.int32]]
    responses: list[NDArray[np.int32]]
    """At least one token each."""
    inference_logprobs: list[NDArray[np.float32]]
    """One per response token."""
    rewards: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.prompt_keys)

    def token_ids(self, sample: int) -> NDArray[np.int32]:
        """Prompt and response of one rollout."""
        return np.concatenate([self.prompts[sample], self.responses[sample]])


def read_rollouts(table: pa.Table) -> Rollouts:
    """Arrays of a rewarded batch, in an order that does not depend on which rollout ended first.

    Raises:
        ValueError: a column is missing or of another type, a value is null, the table is empty, a
            prompt or response is empty, or log-probabilities and tokens do not pair up.
    """
    missing = [name for name in SCHEMA.names if name not in table.column_names]
    if missing:
        raise ValueError(f"the rewarded batch lacks {missing}; it has {table.column_names}")
    table = table.select(SCHEMA.names).cast(SCHEMA)
    nulls = [name for name in SCHEMA.names if table[name].null_count]
    if nulls or table.num_rows == 0:
        raise ValueError(f"the rewarded batch has {table.num_rows} rows and nulls in {nulls}")
    table = table.sort_by([("prompt_key", "ascending"), ("sample_index", "ascending")])
    rollouts = Rollouts(
        prompt_keys=table["prompt_key"].to_pylist(),
        prompts=_ragged(table["prompt_token_ids"]),
        responses=_ragged(table["response_token_ids"]),
        inference_logprobs=_ragged(table["inference_logprobs"]),
        rewards=table["reward"].to_numpy(),
    )
    _check_lengths(rollouts)
    return rollouts


def _ragged(column: pa.ChunkedArray) -> list[NDArray]:
    array = column.combine_chunks()
    values = array.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False))
    return np.split(values, ends[:-1])


def _check_lengths(rollouts: Rollouts) -> None:
    columns = zip(rollouts.prompts, rollouts.responses, rollouts.inference_logprobs, strict=True)
    for sample, (prompt, response, logprobs) in enumerate(columns):
        if len(prompt) == 0 or len(response) == 0 or len(logprobs) != len(response):
            raise ValueError(
                f"a rollout of prompt {rollouts.prompt_keys[sample]} has {len(prompt)} prompt "
                f"tokens, {len(response)} response tokens and {len(logprobs)} log-probabilities: "
                "both texts need a token and every response token its log-probability"
            )


def plan_minibatches(
    prompt_keys: Sequence[str], num_minibatches: int, seed: Sequence[int]
) -> list[list[int]]:
    """Disjoint shares of whole groups, shuffled; together they hold every sample once.

    Args:
        prompt_keys: the group of each sample.
        num_minibatches: at most this many; fewer when there are fewer groups.
        seed: the same seed gives the same shares in the same order.
    """
    groups: dict[str, list[int]] = {}
    for sample, key in enumerate(prompt_keys):
        groups.setdefault(key, []).append(sample)
    keys = sorted(groups)
    order = np.random.default_rng(seed).permutation(len(keys))
    shares = [order[start::num_minibatches] for start in range(min(num_minibatches, len(keys)))]
    return [[sample for at in share for sample in groups[keys[at]]] for share in shares]


def share_by_tokens(num_tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Positions 0..len(num_tokens)-1 dealt to ranks, longest first to the emptiest rank."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for at in sorted(range(len(num_tokens)), key=lambda at: (-num_tokens[at], at)):
        rank = loads.index(min(loads))
        shares[rank].append(at)
        loads[rank] += num_tokens[at]
    return shares


def choose_canaries(rollouts: Rollouts) -> list[list[int]]:
    """Beginnings of rollouts of different prompts, for the engines to reproduce."""
    firsts = {key: sample for sample, key in reversed(list(enumerate(rollouts.prompt_keys)))}
    chosen = sorted(firsts.values())[:NUM_CANARIES]
    return [rollouts.token_ids(sample)[:MAX_CANARY_TOKENS].tolist() for sample in chosen]


def random_canaries(vocab_size: int) -> list[list[int]]:
    """Sequences for the time before the first rollout; always the same."""
    generator = np.random.default_rng(0)
    return generator.integers(vocab_size, size=(NUM_CANARIES, 16)).tolist()
