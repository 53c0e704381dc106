"""A trace shows a step's update, and leaves it as it is."""

import gzip
import json
from collections.abc import Callable

from refrain.engines.learn.trainer import TrainerActor
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import make_batch, started


def test_one_step_is_traced_and_learns_the_same(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config(trace_step=2)
    actor, alone = TrainerActor(config, rank=0), started(make_config())
    actor.restore(None)
    files = []
    for version in range(3):
        batch = make_batch(version, policy_version=version)
        assert actor.train_step(batch) == alone.train_step(batch)
        files.append([str(file) for file in config.run_dir.rglob("*.gz")])
    actor.shutdown()
    expected = config.run_dir.absolute() / "traces" / "step_2" / "trainer-0.json.gz"
    assert files == [[], [str(expected)], [str(expected)]]
    events = json.loads(gzip.decompress(expected.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names
