"""A step draws other prompts in place of those whose samples all have the same reward. Engines,
trainer and scorer are fakes, the rest is real. The scorer makes some prompts dull: all of their
samples get the same reward."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from refrain.benchmarks.growth import take_step
from refrain.benchmarks.stand_ins import GROUP_SIZE, made_up_config, made_up_prompts
from refrain.benchmarks.timed_stubs import LocalStore, hollow_run
from refrain.engines.data.loader import PromptLoader
from refrain.engines.learn.rollouts import read_rollouts
from refrain.engines.learn.training_samples import read_training_samples
from refrain.engines.store.actor import StoredRows
from refrain.schemas.config import TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.rollout import Split
from refrain.schemas.step import StepPlan

pytestmark = pytest.mark.usefixtures("no_prefect")

PER_STEP, NUM_PROMPTS, NUM_STEPS = 8, 40, 5
PACE = 2000.0
names = (f"run-{number}" for number in count())


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one directory for all runs: to create MLflow's database takes seconds."""
    return tmp_path_factory.mktemp("runs")


class Scorers:
    """Reward every other sample of a prompt with 1, and every sample of a dull prompt."""

    def __init__(self, dull: Collection[str]) -> None:
        self.dull = dull

    async def score(self, unscored: StoredRows, prompts: Mapping[str, Prompt]) -> pa.Table:
        assert prompts
        rows = unscored.reference.select(["prompt_key", "sample_index"]).to_pylist()
        scores = [
            row
            | {"reward": float(row["prompt_key"] in self.dull or row["sample_index"] % 2)}
            | {"extra": "{}"}
            for row in rows
        ]
        return pa.Table.from_pylist(scores)


def config_of(directory: Path, staleness: int = 0, **algorithm: Any) -> TrainConfig:
    config = made_up_config(directory, next(names), PER_STEP * GROUP_SIZE, 16)
    values = config.model_dump(mode="json")
    settings = {"type": "dapo"} | algorithm
    return TrainConfig.model_validate(values | {"staleness": staleness, "algorithm": settings})


@asynccontextmanager
async def opened(
    config: TrainConfig, store: LocalStore, dull: Collection[str]
) -> AsyncGenerator[Any]:
    """Open a run over `NUM_PROMPTS` prompts. The groups of `dull` prompts teach nothing."""
    prompts = made_up_prompts(config.model_copy(update={"prompts_per_step": NUM_PROMPTS}), 1000)
    loader = PromptLoader(
        list(prompts), prompts_per_step=PER_STEP, num_epochs=1, shuffle=True, seed=0
    )
    async with hollow_run(config, store, NUM_STEPS, PACE, None) as (live, _):
        scorers: Any = Scorers(dull)
        live.run.scorers = scorers
        live.run.inputs = replace(live.run.inputs, prompts=prompts, loader=loader)
        yield live


def orders(step: int = 1) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a step's own prompts, and the prompts that it draws next."""
    loader = PromptLoader(
        [f"{i:032x}" for i in range(NUM_PROMPTS)],
        prompts_per_step=PER_STEP,
        num_epochs=1,
        shuffle=True,
        seed=0,
    )
    return loader.prompts_of(step), loader.refills_of(step)


def some_dull(step: int = 1) -> set[str]:
    """Return 5 of the step's own 8 prompts, and every third of those that it draws next."""
    own, more = orders(step)
    return {*own[:5], *more[::3]}


async def plan_of(store: LocalStore, step: int = 1) -> StepPlan:
    return await store.call("plan", Split.TRAIN, step)


def drawn_by(plan: StepPlan) -> list[str]:
    """Return the prompts that were drawn in place of others."""
    keys = [group.prompt_key for group in plan.groups]
    return keys[len(keys) - plan.num_refills :]


async def trained_share(store: LocalStore, config: TrainConfig, step: int) -> tuple[int, int]:
    """Return how many groups of a step's batch are trained on, and how many it has."""
    rollouts = read_rollouts(await store.call("training_rows", step))
    samples, _ = read_training_samples(rollouts, config, step - 1)
    groups = {sample.rollout.prompt_key for sample in samples}
    taught = {sample.rollout.prompt_key for sample in samples if sample.counted.any()}
    return len(taught), len(groups)


def make_store(config: TrainConfig) -> LocalStore:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return LocalStore(config.run_dir / "refrain.duckdb")


async def test_a_step_trains_on_as_many_groups_as_it_wants(runs_dir: Path) -> None:
    config = config_of(runs_dir)
    store, (own, more) = make_store(config), orders()
    async with opened(config, store, some_dull()) as live:
        report, batch = await take_step(live, 1)
    plan = await plan_of(store)
    drawn = drawn_by(plan)
    assert {group.prompt_key for group in plan.groups[:PER_STEP]} == set(own)
    # 5 groups are missing and 3 of 8 were useful: draw 8 more, of which every third is dull.
    assert set(drawn) == set(more[:8])
    assert await trained_share(store, config, 1) == (3 + 5, 16)
    assert batch.num_refills == report.metrics["rollout/num_refills"] == 8
    rows = await store.call("rollouts", Split.TRAIN, 1, ["prompt_key", "sample_index", "epoch"])
    samples = {(row["prompt_key"], row["sample_index"]) for row in rows.to_pylist()}
    assert len(samples) == rows.num_rows == 16 * GROUP_SIZE == batch.num_rollouts
    assert set(rows["epoch"].to_pylist()) == {0}
    assert sum(share.num_rollouts for share in batch.shares) == batch.num_rollouts


async def test_later_batches_are_refilled_too(runs_dir: Path) -> None:
    config = config_of(runs_dir)
    store, (own, more) = make_store(config), orders()
    async with opened(config, store, {*own[:2], *more[:3]}) as live:
        await take_step(live, 1)
    # 2 of 8 are missing: draw 3, all dull. Now 6 of 11 are useful: draw 4 more.
    assert set(drawn_by(await plan_of(store))) == set(more[:7])
    assert await trained_share(store, config, 1) == (6 + 4, 15)


@pytest.mark.parametrize("max_batches", [1, 3, 10])
async def test_no_more_batches_are_generated_than_may_be(runs_dir: Path, max_batches: int) -> None:
    config = config_of(runs_dir, max_num_gen_batches=max_batches)
    store, (own, more) = make_store(config), orders()
    async with opened(config, store, {*own, *more}) as live:
        _, batch = await take_step(live, 1)
    drawn = min(max_batches * PER_STEP, NUM_PROMPTS)
    assert len((await plan_of(store)).groups) == drawn
    assert batch.num_rollouts == drawn * GROUP_SIZE
    assert await trained_share(store, config, 1) == (0, drawn)


async def test_other_algorithms_draw_nothing(runs_dir: Path) -> None:
    config = config_of(runs_dir, type="grpo")
    store = make_store(config)
    async with opened(config, store, some_dull()) as live:
        await take_step(live, 1)
    assert (await plan_of(store)).num_refills == 0


async def test_the_next_steps_have_their_own_prompts(runs_dir: Path) -> None:
    config = config_of(runs_dir)
    store = make_store(config)
    async with opened(config, store, some_dull()) as live:
        for step in range(1, NUM_STEPS + 1):
            await take_step(live, step)
    for step in range(1, NUM_STEPS + 1):
        plan = await plan_of(store, step)
        own = plan.groups[: len(plan.groups) - plan.num_refills]
        assert {group.prompt_key for group in own} == set(orders(step)[0])
        useful, _ = await trained_share(store, config, step)
        assert useful >= PER_STEP


async def ended_in_the_second_batch(
    config: TrainConfig, store: LocalStore, dull: Collection[str]
) -> set[tuple[str, int, float]]:
    """Leave the database of a process that ended in the second batch of step 1, and return its
    rollouts. Each of the step's own groups lacks a sample. Three refills have half of theirs."""
    async with opened(config, store, dull) as live:
        await take_step(live, 1)
    own, more = orders()
    kept = "prompt_key IN (SELECT unnest($keys)) AND sample_index < $below"
    store._store._con.execute(
        f"DELETE FROM rollouts WHERE NOT ({kept}) AND prompt_key NOT IN (SELECT unnest($own))",
        {"keys": list(more[:3]), "below": GROUP_SIZE // 2, "own": list(own)},
    )
    store._store._con.execute("DELETE FROM rollouts WHERE sample_index = 7")
    await store.call("truncate_after", 0, 0)
    rows = await finished(store)
    assert len(rows) == PER_STEP * (GROUP_SIZE - 1) + 3 * GROUP_SIZE // 2
    return rows


async def finished(store: LocalStore) -> set[tuple[str, int, float]]:
    columns = ["prompt_key", "sample_index", "finished_s"]
    rows = await store.call("rollouts", Split.TRAIN, 1, columns)
    return {tuple(row.values()) for row in rows.select(columns).to_pylist()}


async def test_a_resumed_step_draws_the_same_and_loses_nothing(runs_dir: Path) -> None:
    config, dull = config_of(runs_dir), some_dull()
    store = make_store(config)
    before = await ended_in_the_second_batch(config, store, dull)
    async with opened(config, store, dull) as live:
        await take_step(live, 1)
    assert set(drawn_by(await plan_of(store))) == set(orders()[1][:8])
    after = await finished(store)
    assert before < after
    assert len(after) == 16 * GROUP_SIZE


async def test_begun_refill_is_finished_after_a_resume(runs_dir: Path) -> None:
    """This happens in a pipeline, which resumes a step with a newer policy version."""
    config = config_of(runs_dir)
    store = make_store(config)
    before = await ended_in_the_second_batch(config, store, some_dull())
    async with opened(config, store, ()) as live:
        await take_step(live, 1)
    drawn = drawn_by(await plan_of(store))
    assert set(drawn) == set(orders()[1][:3])
    after = await finished(store)
    assert before < after
    assert len(after) == (PER_STEP + len(drawn)) * GROUP_SIZE


async def test_in_a_pipeline_the_next_step_is_queued_behind_the_first_batch(
    runs_dir: Path,
) -> None:
    """So engines have work while the first batch is scored. Every batch has its step's weights."""
    config = config_of(runs_dir, 1)
    store = make_store(config)
    dull = set().union(*(some_dull(step) for step in range(1, 4)))

    async def flow(live: Any, step: int) -> None:
        await live.milestones.turn(step)
        await take_step(live, step)

    async with opened(config, store, dull) as live:
        await asyncio.wait_for(asyncio.gather(*(flow(live, step) for step in (1, 2, 3))), 60.0)
    ended_s = 0.0
    for step in (1, 2, 3):
        useful, drawn = await trained_share(store, config, step)
        plan = await plan_of(store, step)
        assert useful >= PER_STEP or drawn == NUM_PROMPTS
        assert plan.num_refills > 0
        rows = await store.call("rollouts", Split.TRAIN, step)
        assert rows.num_rows == plan.num_planned
        for name in ("policy_version", "last_policy_version"):
            assert set(rows[name].to_pylist()) == {max(0, step - 2)}
        times = rows["finished_s"].to_pylist()
        # Step 3 has to wait until step 1 is trained.
        assert min(times) < ended_s or step != 2
        ended_s = max(times)
