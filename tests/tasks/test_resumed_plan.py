"""The first step of a resumed run gets the same plan as in a run that was not interrupted. The plan
depends on the database only, and only on rows that are always there when the step is planned."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pytest

from refrain.benchmarks.growth import take_step
from refrain.benchmarks.stand_ins import made_up_config
from refrain.benchmarks.timed_stubs import LocalStore, hollow_run
from refrain.engines.latency.fitted import FittedLatency
from refrain.schemas.config import TrainConfig
from refrain.schemas.layout import Pool
from refrain.schemas.step import StepPlan
from refrain.tasks.history import index_history
from refrain.tasks.run.policies import step_policies
from refrain.tasks.schedule import rank_and_group
from tests.latency.machines import AffineMachine, measure

pytestmark = pytest.mark.usefixtures("no_prefect")

NUM_STEPS, PLANNED = 6, 4
LATENCY = FittedLatency(measure(AffineMachine(), tp_degrees=(1, 2)))
POOL = Pool(0, {1: (0, 1), 2: (2,)})


def config_of(directory: Path, staleness: int, drafter: str = "histospec") -> TrainConfig:
    config = made_up_config(directory, "hollow", 64, 16)
    values = config.model_dump(mode="json") | {
        "staleness": staleness,
        "pat": {"tp_degrees": [2]},
        "profile": "p",
        "specactor": {"drafter": drafter},
    }
    return TrainConfig.model_validate(values)


async def planned(config: TrainConfig, store: LocalStore) -> tuple[Any, Any]:
    """Return the plan and the policies of the step, made in a new process from the database."""
    async with hollow_run(config, store, NUM_STEPS, 1000.0, None) as (live, _):
        return await plan_in(live)


async def plan_in(live: Any) -> tuple[Any, Any]:
    history = await index_history.fn(live.ref, PLANNED)
    plan: StepPlan = await rank_and_group.fn(live.ref, PLANNED, history, (0, 1))
    live.engines.pools = (POOL,)
    live.run.inputs = replace(live.run.inputs, latency=LATENCY)
    policies = await step_policies(live.run, live.engines, plan)
    assert policies
    live.engines.pools = ()
    return plan.model_dump(exclude={"created_s"}), contents(policies)


def contents(value: Any) -> Any:
    """Return all that an object holds, independent of the order of dictionaries."""
    if isinstance(value, Mapping):
        return sorted((str(key), contents(own)) for key, own in value.items())
    if isinstance(value, list | tuple):
        return [contents(own) for own in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        return type(value).__name__, contents(own)
    if hasattr(value, "__dict__") and not callable(value):
        return type(value).__name__, contents(vars(value))
    return value if isinstance(value, float | int | str) else str(type(value))


async def databases(config: TrainConfig, steps: Sequence[int]) -> tuple[list[Path], Any]:
    """Return copies of a run's database after each of these steps, and the run's own plan of the
    next step."""
    config.run_dir.mkdir(parents=True)
    store, copies = LocalStore(config.run_dir / "refrain.duckdb"), []
    async with hollow_run(config, store, NUM_STEPS, 1000.0, None) as (live, _):
        for step in range(1, PLANNED):
            await take_step(live, step)
            if step in steps:
                store._store._con.execute("CHECKPOINT")
                copies.append(config.run_dir / f"after_{step}.duckdb")
                copyfile(config.run_dir / "refrain.duckdb", copies[-1])
        return copies, await plan_in(live)


@pytest.mark.parametrize(
    ("staleness", "drafter", "planned_after"),
    [
        # Planned when the step before is trained.
        (0, "histospec", (3,)),
        (0, "ngram", (3,)),
        # Planned when the step before is queued. The one before that may just have begun.
        (1, "histospec", (1, 2, 3)),
        (1, "ngram", (1, 2, 3)),
    ],
)
async def test_a_step_is_planned_as_in_the_run_that_went_on(
    tmp_path: Path, staleness: int, drafter: str, planned_after: Sequence[int]
) -> None:
    """Drafts from history are off. With n-grams the plan counts passes, otherwise tokens."""
    config = config_of(tmp_path, staleness, drafter)
    copies, went_on = await databases(config, planned_after)
    by_passes = [g["expected_passes"] != g["expected_tokens"] for g in went_on[0]["groups"]]
    assert by_passes == [drafter == "ngram"] * len(by_passes)
    for copy in copies:
        resumed = await planned(config, LocalStore(copy))
        assert resumed == went_on


async def test_plan_depends_on_the_stored_steps(tmp_path: Path) -> None:
    """Negative control: with one step less in the database, the plan differs."""
    config = config_of(tmp_path, 0)
    (fewer,), went_on = await databases(config, (2,))
    assert await planned(config, LocalStore(fewer)) != went_on
