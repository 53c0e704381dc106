"""The GPUs that each part of a run needs."""

from dataclasses import replace

from refrain.engines.gpus.placement import Wanted
from refrain.engines.pat.layouts import plan_pools
from refrain.schemas.config import TrainConfig

TRAINER = "the trainer"


def wanted_gpus(config: TrainConfig) -> list[Wanted]:
    """Return the GPUs of all parts of a training run."""
    drafters = config.engine.drafter_processes
    engines = wanted_by_engines(config)
    own = tuple(one.what for one in engines)
    trainer = Wanted(TRAINER, config.trainer.num_processes, "trainer.num_processes", spreads=True)
    return [
        *engines,
        *(
            # The processes of one drafter divide the engines among them, see `Drafters`.
            Wanted(drafter_name(i), 1, "specactor.draft_models", beside=own)
            for i in range(len(drafters))
        ),
        replace(trainer, within=own) if config.takes_turns else trainer,
    ]


def num_devices(config: TrainConfig) -> int:
    """Return the number of a run's GPUs, each counted once. Without GPUs, the number of processes
    that would have one."""
    return sum(one.num_gpus for one in wanted_gpus(config) if not one.within)


def wanted_by_engines(config: TrainConfig) -> list[Wanted]:
    """Return the GPUs of the rollout engines: one entry per engine, or per pool of engines that
    share GPUs."""
    rollout, pat = config.rollout, config.pat
    pools, specs = plan_pools(
        rollout.num_engines, rollout.tp_degree, pat.tp_degrees, pat.gpus_per_node
    )
    setting = "rollout.num_engines x rollout.tp_degree"
    if pools:
        return [Wanted(pool_name(pool.index), pool.num_gpus, setting) for pool in pools]
    return [Wanted(engine_name(spec.engine), spec.tp_degree, setting) for spec in specs]


def engine_name(index: int) -> str:
    return f"engine {index}"


def pool_name(index: int) -> str:
    return f"pool {index} (pat.gpus_per_node)"


def drafter_name(index: int) -> str:
    return f"drafter process {index}"
