"""Choose how many new prompts to draw for groups whose samples all have the same reward. Pure.

Source: DAPO's dynamic sampling (arXiv:2503.14476, section 3.2), one batch at a time.
"""

import math
from collections import defaultdict
from collections.abc import Collection

import pyarrow as pa

from refrain.engines.learn.advantages import all_equal


def num_useful(rewards: pa.Table, prompt_keys: Collection[str]) -> int:
    """Return how many of these prompts have groups whose rewards differ. `rewards`: the rewards of
    a step (`engines.store.tables.REWARDS`). Samples deferred to the step have an index below 0 and
    belong to another step's groups, so they do not count."""
    groups: dict[str, list[float]] = defaultdict(list)
    columns = ("prompt_key", "sample_index", "reward")
    for key, sample, reward in zip(*(rewards[name].to_pylist() for name in columns), strict=True):
        if sample >= 0:
            groups[key].append(reward)
    return sum(key in groups and not all_equal(groups[key]) for key in set(prompt_keys))


def num_to_draw(useful: int, drawn: int, wanted: int, batch: int) -> int:
    """Return the number of prompts in the next batch, at most `batch`. It should fill up the
    `wanted` groups if as large a share is useful as among the prompts drawn so far."""
    missing = wanted - useful
    if missing <= 0:
        return 0
    return min(batch, math.ceil(missing * drawn / useful) if useful else batch)
