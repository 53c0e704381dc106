"""Histories include responses that migrated and responses that were deferred to the next step."""

import asyncio

from refrain.engines.histospec.index import END
from refrain.engines.histospec.index_file import index_path, open_index
from refrain.engines.histospec.library import IndexLibrary
from refrain.engines.histospec.worker import histories
from refrain.engines.rollout.moves import Defer, Migrate
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store
from refrain.schemas.drafting import DraftingConfig
from refrain.schemas.rollout import Split
from refrain.schemas.step import RolloutOutcome, SampleName
from refrain.tasks.reward import last_rolled_out
from tests.rollout.fakes import FakeEngine, MoveAt, Recorder, request, work
from tests.store.test_store import make_rewards

FIRST = work(1, [4, 40, 4, 40])
SECOND = [(0, request("q0", 40, step=2)), (1, request("q1", 4, step=2))]


async def roll_out():
    """Run two steps: p1 is deferred from step 1 to 2, and p3 migrates."""
    recorder = Recorder([FakeEngine(0), FakeEngine(1)])
    await recorder.coordinator.start()
    policies = [
        MoveAt("p3", 3, lambda id: Migrate(id, 0)),
        MoveAt("p1", 10, lambda id: Defer(id, 0)),
    ]
    first = recorder.roll_out(1, FIRST, policies=policies, min_rollouts=1)
    second = recorder.roll_out(2, SECOND, min_rollouts=0)
    one, two = await asyncio.wait_for(asyncio.gather(first, second), 20)
    assert (one.moves.num_migrated, one.moves.num_deferred) == (1, 1)
    return recorder, [one, two]


def names(ids):
    return tuple(SampleName(prompt_key=id.prompt_key, sample_index=id.sample_index) for id in ids)


async def test_moved_responses_are_indexed_whole(tmp_path):
    recorder, outcomes = await roll_out()
    library = IndexLibrary(tmp_path / "history", DraftingConfig())
    wanted = []
    with Store(tmp_path / "run.duckdb") as store:
        for step, outcome in enumerate(outcomes, 1):
            store.add_rollouts(rollout_rows(recorder.finished[step]), epoch=0)
            ids = [rollout.request.id for rollout in recorder.finished[step]]
            rewards = make_rewards([(id.prompt_key, id.sample_index, 1.0) for id in ids])
            store.add_rewards(Split.TRAIN, step, rewards)
            left = RolloutOutcome(carried=names(outcome.carried), deferred=names(outcome.deferred))
            own = rewards.filter([id.sample_index >= 0 for id in ids])
            wanted.append(last_rolled_out(step, own, left))
            library.add(histories(store.index_rows(Split.TRAIN, wanted[-1])))
    assert wanted[0] == dict.fromkeys(["p0", "p2", "p3"], 1), "p1 is not finished"
    assert wanted[1] == {"p1": 1, "q0": 2, "q1": 2}
    of_prompt = {r.request.id.prompt_key: r for rs in recorder.finished.values() for r in rs}
    for key in ("p1", "p3", "q0"):
        rollout = of_prompt[key]
        found = open_index(index_path(tmp_path / "history", key), key)
        expected = [*rollout.request.prompt_token_ids[-7:], *rollout.generated.token_ids, END]
        assert len(rollout.generated.token_ids) == 40
        assert (found.text.tolist(), found.step) == (expected, wanted[key != "p3"][key])
