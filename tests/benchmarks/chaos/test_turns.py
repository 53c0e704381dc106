"""Turns that a killed driver loses are counted by group."""

from pathlib import Path

from refrain.benchmarks.chaos.turns import lost_turns, num_taken_over
from refrain.engines.store.store import Store
from refrain.engines.store.turns import turn_rows
from refrain.schemas.keys import group_seed
from refrain.schemas.rollout import Split, Turn
from tests.store.test_open_turns import turn
from tests.store.test_store import add_rollouts
from tests.store.test_turns import talk

NUM_STEPS, GROUP_SIZE = 2, 3


def test_a_group_may_lose_one_turn_for_each_open_conversation(tmp_path: Path) -> None:
    """One of three conversations has finished after two turns, and one has two recorded turns."""
    group = str(group_seed(7, 1, Split.TRAIN, "a"))
    with Store(tmp_path / "run.duckdb") as store:
        add_rollouts(store, talk((Turn(1, 1, ended_s=1e9), Turn(2))))
        store.add_turns(turn_rows([turn(0, sample=1), turn(1, sample=1)]))
        assert num_taken_over(store, NUM_STEPS) == 1
        for num_lost in range(4):
            answered = [group] * (4 + num_lost)
            number, complaint = lost_turns(store, answered, 7, NUM_STEPS, GROUP_SIZE)
            assert (number, bool(complaint)) == (num_lost, num_lost > 2)
        assert lost_turns(store, [group] * 3, 7, NUM_STEPS, GROUP_SIZE)[1], "one too many"
