"""Rewarded rollouts as arrays, and who trains on which of them when."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engines.store.tables import TRAINING

SORTED_BY = ("origin_step", "prompt_key", "sample_index")

NUM_CANARIES = 3
MAX_CANARY_TOKENS = 128


class Group(NamedTuple):
    """The samples that were drawn for one prompt in one step's plan."""

    origin_step: int
    prompt_key: str


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The columns of a rewarded batch, sorted by group and sample index."""

    groups: list[Group]
    sample_indices: list[int]
    prompts: list[NDArray[np.int32]]
    responses: list[NDArray[np.int32]]
    """Response tokens, at least one each."""
    inference_logprobs: list[NDArray[np.float32]]
    """One per response token."""
    rewards: NDArray[np.float64]
    group_rewards: list[NDArray[np.float64]]
    """Known rewards of each sample's group."""
    group_lengths: list[NDArray[np.int32]]
    """Response tokens of the same samples."""
    versions: list[NDArray[np.int32]]
    """Policy version of each response token."""

    def __len__(self) -> int:
        return len(self.groups)

    def token_ids(self, sample: int) -> NDArray[np.int32]:
        """Prompt and response of one rollout."""
        return np.concatenate([self.prompts[sample], self.responses[sample]])


def read_rollouts(table: pa.Table) -> Rollouts:
    """Arrays of a rewarded batch, in an order that does not depend on which rollout ended first.

    Raises:
        ValueError: a column is missing or of another type, a value is null, the table is empty, a
            prompt or response is empty, log-probabilities, policy versions and tokens do not pair
            up, a reward is not finite, or a group lacks its own sample.
    """
    missing = [name for name in TRAINING.names if name not in table.column_names]
    if missing:
        raise ValueError(f"the rewarded batch lacks {missing}; it has {table.column_names}")
    table = table.select(TRAINING.names).cast(TRAINING)
    nulls = [name for name in TRAINING.names if table[name].null_count]
    if nulls or table.num_rows == 0:
        raise ValueError(f"the rewarded batch has {table.num_rows} rows and nulls in {nulls}")
    table = table.sort_by([(name, "ascending") for name in SORTED_BY])
    origin_steps, prompt_keys, sample_indices = (table[name].to_pylist() for name in SORTED_BY)
    rollouts = Rollouts(
        groups=list(map(Group, origin_steps, prompt_keys)),
        sample_indices=sample_indices,
        prompts=_ragged(table["prompt_token_ids"]),
        responses=_ragged(table["response_token_ids"]),
        inference_logprobs=_ragged(table["inference_logprobs"]),
        rewards=table["reward"].to_numpy(),
        group_rewards=_ragged(table["group_rewards"]),
        group_lengths=_ragged(table["group_lengths"]),
        versions=_versions(table["version_spans"]),
    )
    for sample in range(len(rollouts)):
        _check_lengths(rollouts, sample)
        _check_group(rollouts, sample)
    return rollouts


def _ragged(column: pa.ChunkedArray) -> list[NDArray]:
    array = column.combine_chunks()
    return _split(array.flatten().to_numpy(zero_copy_only=False), array)


def _versions(column: pa.ChunkedArray) -> list[NDArray[np.int32]]:
    spans = column.combine_chunks()
    versions, counts = (part.to_numpy() for part in spans.flatten().flatten())
    pairs = zip(_split(versions, spans), _split(counts, spans), strict=True)
    return [np.repeat(*pair) for pair in pairs]


def _split(values: NDArray, lists: pa.ListArray) -> list[NDArray]:
    return np.split(values, np.cumsum(lists.value_lengths().to_numpy())[:-1])


def _check_lengths(rollouts: Rollouts, sample: int) -> None:
    num_prompt, num_response = len(rollouts.prompts[sample]), len(rollouts.responses[sample])
    num_logprobs = len(rollouts.inference_logprobs[sample])
    num_versions = len(rollouts.versions[sample])
    if num_prompt == 0 or num_response == 0 or not num_logprobs == num_versions == num_response:
        raise ValueError(
            f"a rollout of prompt {rollouts.groups[sample].prompt_key} has {num_prompt} prompt "
            f"tokens, {num_response} response tokens and {num_logprobs} log-probabilities and "
            f"{num_versions} policy versions for them: both texts need a token and every response "
            "token its log-probability and its version"
        )


def _check_group(rollouts: Rollouts, sample: int) -> None:
    own = (rollouts.rewards[sample], len(rollouts.responses[sample]))
    rewards, lengths = rollouts.group_rewards[sample], rollouts.group_lengths[sample]
    name = (
        f"response {rollouts.sample_indices[sample]} of prompt {rollouts.groups[sample].prompt_key}"
    )
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


def plan_minibatches(
    groups: Sequence[Group], num_minibatches: int, seed: Sequence[int]
) -> list[list[int]]:
    """Disjoint shares of whole groups, shuffled; together they hold every sample once.

    Args:
        groups: the group of each sample.
        num_minibatches: at most this many; fewer when there are fewer groups.
        seed: the same seed gives the same shares in the same order.
    """
    members: dict[Group, list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(group, []).append(sample)
    keys = sorted(members)
    order = np.random.default_rng(seed).permutation(len(keys))
    shares = [order[start::num_minibatches] for start in range(min(num_minibatches, len(keys)))]
    return [[sample for at in share for sample in members[keys[at]]] for share in shares]


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
    keys = [group.prompt_key for group in rollouts.groups]
    firsts = {key: sample for sample, key in reversed(list(enumerate(keys)))}
    chosen = sorted(firsts.values())[:NUM_CANARIES]
    return [rollouts.token_ids(sample)[:MAX_CANARY_TOKENS].tolist() for sample in chosen]


def random_canaries(vocab_size: int) -> list[list[int]]:
    """Sequences for the time before the first rollout; always the same."""
    generator = np.random.default_rng(0)
    return generator.integers(vocab_size, size=(NUM_CANARIES, 16)).tolist()
