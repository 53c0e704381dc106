"""Turns of conversations that a killed driver loses, and those that its successor takes over."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from refrain.engines.store.store import Store
from refrain.engines.store.turns import by_sample
from refrain.schemas.keys import group_seed
from refrain.schemas.rollout import FinishReason, Split

COLUMNS = ("origin_step", "prompt_key", "turns", "finish_reason")


def lost_turns(
    store: Store, answered: Iterable[str], seed: int, num_steps: int, group_size: int
) -> tuple[int, str]:
    """Return how many answered turns the store of a dead run lacks, and a complaint if a group lost
    more than one for each of its open conversations.

    `answered`: the environment's seed for each answered turn. All samples of a group have the same.
    `seed`: of the run.
    """
    lost, finished = Counter(answered), Counter[str]()
    for split, row in _rows(store, num_steps):
        group = str(group_seed(seed, row["origin_step"], split, row["prompt_key"]))
        # The environment has not seen a turn that was cut.
        was_cut = row["finish_reason"] == FinishReason.LENGTH
        lost[group] -= len(row["turns"]) - was_cut
        finished[group] += 1
    for id, turns in by_sample(store.open_turns()).items():
        lost[str(group_seed(seed, id.step, id.split, id.prompt_key))] -= len(turns)
    bad = {g: num for g, num in lost.items() if not 0 <= num <= group_size - finished[g]}
    return lost.total(), f"groups lost turns with their driver: {bad}" if bad else ""


def num_taken_over(store: Store, num_steps: int) -> int:
    """Return how many turns of the rollouts an earlier process of the run has drawn."""
    turns = (turn for _, row in _rows(store, num_steps) for turn in row["turns"])
    return sum(turn["ended_s"] is None for turn in turns)


def _rows(store: Store, num_steps: int) -> Iterator[tuple[Split, dict[str, Any]]]:
    for split in Split:
        for step in range(num_steps + 1):
            for row in store.rollouts(split, step, COLUMNS).to_pylist():
                yield split, row
