"""Reward rollouts of a live run, train on them, and index them for the next step. This process gets
only the run's directory. Print the results of the tasks."""

import asyncio
import sys
from pathlib import Path

from refrain.flows.environment import quieten

quieten()


async def work(run_dir: Path, batch_json: str) -> None:
    from refrain.schemas.run import RunRef
    from refrain.schemas.step import RolloutBatch
    from refrain.tasks.history import index_history
    from refrain.tasks.learn import train_policy
    from refrain.tasks.reward import reward
    from refrain.tasks.run.run_dir import REF_FILE

    run = RunRef.model_validate_json((run_dir / REF_FILE).read_text())
    rewarded = await reward.fn(run, RolloutBatch.model_validate_json(batch_json))
    history = await index_history.fn(run, 2)
    trained = await train_policy.fn(run, rewarded)
    for result in (rewarded, history, trained.model_copy(update={"weights": None})):
        print(type(result).__name__, result.model_dump_json(warnings=False), flush=True)


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), sys.argv[2]))
