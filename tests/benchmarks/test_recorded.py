"""A recorded step gets the history that the run had at that time, and can be dealt by tokens."""

from refrain.benchmarks.recorded import write_history
from refrain.engines.histospec.index import END
from refrain.engines.histospec.index_file import index_path, open_index
from refrain.engines.histospec.shared import SharedReader
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store
from refrain.schemas.rollout import Split
from tests.store.test_store import make_rewards, make_rollout

KEYS = {step: ("a", "b") if step % 2 else ("c", "d") for step in range(1, 9)}
"""Prompts of each step. An epoch has two steps."""


def texts(index) -> set[int]:
    """Return the tokens of an index's responses. All tokens of a step are 10 + its number."""
    return {token for token in index.text.tolist() if token >= 10 and token != END}


def test_history_is_of_the_steps_before_and_of_two_epochs_at_most(tmp_path):
    directory = tmp_path / "history"
    directory.mkdir()
    (directory / "of_another_step.index").write_bytes(b"")
    with Store(tmp_path / "run.duckdb") as store:
        for step, keys in KEYS.items():
            rollouts = [make_rollout(step, key, token=10 + step) for key in keys]
            store.add_rollouts(rollout_rows(rollouts), epoch=(step - 1) // 2)
            store.add_rewards(Split.TRAIN, step, make_rewards([(key, 0, 1.0) for key in keys]))
        write_history(store, 7, KEYS[7], 2, directory)
    own = {path.stem for path in directory.glob("*.index")}
    assert own == {"a", "b"}
    assert all(texts(open_index(index_path(directory, key), key)) == {15} for key in own)
    shared, num_refused = SharedReader(directory).read()
    assert num_refused == 0
    assert set().union(*map(texts, shared.values())) == {13, 14, 15, 16}
