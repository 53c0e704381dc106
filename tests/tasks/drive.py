"""Open the run of a config file, roll out its first step, and wait until stdin ends. Print the
rollouts, and at the end the policy version that the trainer holds."""

import asyncio
import sys
from pathlib import Path

from refrain.flows.environment import quieten

quieten()


async def drive(file: Path) -> None:
    from refrain.engines.gpus.gpu_sharing import Role
    from refrain.flows.config_file import load_config
    from refrain.tasks.history import index_history
    from refrain.tasks.rollout import rollout
    from refrain.tasks.run.live import open_run
    from refrain.tasks.run.plan import plan_run
    from refrain.tasks.schedule import rank_and_group

    async with open_run(plan_run(load_config(file, ()), resume=False)) as live:
        history = await index_history.fn(live.ref, 1)
        plan = await rank_and_group.fn(live.ref, 1, history, live.engines.living)
        weights = live.milestones.published.last
        async with live.engines.turns.of(Role.ENGINES):
            batch = await rollout.fn(live.ref, plan, weights, live.engines)
        async with live.engines.turns.of(Role.TRAINER):
            print(f"BATCH {batch.model_dump_json()}", flush=True)
            await asyncio.to_thread(sys.stdin.read)
            published = await live.run.trainer.publish(1)
            print(f"VERSION {published.policy_version}", flush=True)


if __name__ == "__main__":
    asyncio.run(drive(Path(sys.argv[1])))
