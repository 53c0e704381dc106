"""Turns of conversations that a killed driver loses, and those that its successor takes over."""

from collections import Counter
from pathlib import Path

from benchmarks.chaos.run_traces import LOCK_TIMEOUT_S
from engines.store.store import Store
from engines.store.turns import by_sample
from schemas.keys import group_seed
from schemas.rollout import FinishReason, RequestId, Split
from tasks.run.run_dir import STORE_FILE, read_config

COLUMNS = ("origin_step", "prompt_key", "turns", "finish_reason")


def lost_turns(run_dir: Path, answered: Path, num_steps: int, group_size: int) -> tuple[int, str]:
    """Return how many answered turns the store of a dead run lacks, so that they are drawn again,
    and a complaint if a group lost more than one for each of its open conversations.

    `answered`: file with the environment's seed in one line for each answered turn. All samples of
    a group have the same seed.
    """
    seed = read_config(run_dir).seed
    recorded: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    with Store(run_dir / STORE_FILE, read_only=True, lock_timeout_s=LOCK_TIMEOUT_S) as store:
        for split in Split:
            for step in range(num_steps + 1):
                for row in store.rollouts(split, step, COLUMNS).to_pylist():
                    own = str(group_seed(seed, row["origin_step"], split, row["prompt_key"]))
                    # The environment has not seen a turn that was cut.
                    was_cut = row["finish_reason"] == FinishReason.LENGTH
                    recorded[own] += len(row["turns"]) - was_cut
                    finished[own] += 1
        for sample, turns in by_sample(store.open_turns()).items():
            recorded[_seed(seed, sample)] += len(turns)
    lost = Counter(answered.read_text().split())
    lost.subtract(recorded)
    for own, number in lost.items():
        if not 0 <= number <= group_size - finished[own]:
            return lost.total(), f"the group {own} lost {number} turns with its driver"
    return lost.total(), ""


def num_taken_over(run_dir: Path, num_steps: int) -> int:
    """Return how many turns of the rollouts an earlier process of the run has drawn."""
    with Store(run_dir / STORE_FILE, read_only=True, lock_timeout_s=LOCK_TIMEOUT_S) as store:
        rows = [
            row
            for split in Split
            for step in range(num_steps + 1)
            for row in store.rollouts(split, step, ("turns",)).to_pylist()
        ]
    return sum(turn["ended_s"] is None for row in rows for turn in row["turns"])


def _seed(seed: int, sample: RequestId) -> str:
    return str(group_seed(seed, sample.step, sample.split, sample.prompt_key))
