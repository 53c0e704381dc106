"""Prompts that a step draws in place of those whose samples were all worth the same: DAPO's dynamic
sampling (arXiv:2503.14476, section 3.2), a batch at a time. Pure."""

import math
from collections import defaultdict
from collections.abc import Collection

import pyarrow as pa

from engines.learn.advantages import all_equal


def num_useful(rewards: pa.Table, prompt_keys: Collection[str]) -> int:
    """Groups with rewards that differ, among these prompts. `rewards`: a step's
    (`engines.store.tables.REWARDS`); samples deferred to it have an index below 0 and belong to the
    groups of another step."""
    groups: dict[str, list[float]] = defaultdict(list)
    columns = ("prompt_key", "sample_index", "reward")
    for key, sample, reward in zip(*(rewards[name].to_pylist() for name in columns), strict=True):
        if sample >= 0:
            groups[key].append(reward)
    return sum(key in groups and not all_equal(groups[key]) for key in set(prompt_keys))


def num_to_draw(useful: int, drawn: int, wanted: int, batch: int) -> int:
    """Prompts of the next batch: as many as are expected to make up for what is missing of `wanted`
    groups, when as large a share of them is useful as of those drawn so far; a batch at most."""
    missing = wanted - useful
    if missing <= 0:
        return 0
    return min(batch, math.ceil(missing * drawn / useful) if useful else batch)
