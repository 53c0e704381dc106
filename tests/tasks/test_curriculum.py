"""A run skips prompts that are always or never solved. It draws the same prompts whenever rewards
arrive, and after a resume."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refrain.benchmarks.timed_stubs import LocalStore
from refrain.engines.data.loader import PromptLoader
from refrain.engines.data.mixture import Portion
from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import Split
from refrain.tasks.history import drawn_prompts, known_before, pass_rates
from tests.store.test_store import add_rollouts, make_rewards, make_rollout

KEYS = tuple(f"p{number:02}" for number in range(16))
EASY, HARD = KEYS[:3], KEYS[-2:]
PER_STEP, PER_EPOCH = 4, 4
GIVEN = {"prompts_per_step": PER_STEP, "num_epochs": 5, "shuffle": True, "seed": 0}
PORTIONS = (Portion("one", KEYS[:8]), Portion("two", KEYS[8:]))


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Any]:
    """Yield a function that makes a run with a real store. Nothing else of it is needed."""
    numbers, stores = count(), list[LocalStore]()

    def make(staleness: int, **curriculum: Any) -> Any:
        values = {"model": {"path": "m"}, "data": {"train": "t", "curriculum": curriculum}}
        config = TrainConfig.model_validate(values | {"staleness": staleness})
        stores.append(LocalStore(tmp_path / f"{next(numbers)}.duckdb"))
        inputs = SimpleNamespace(
            loader=PromptLoader(KEYS, **GIVEN, portions=PORTIONS, curriculum=config.data.curriculum)
        )
        own = {"config": config, "inputs": inputs, "store": stores[-1].call}
        return SimpleNamespace(**own, file=stores[-1]._store)

    yield make
    for store in stores:
        store._store.close()


def score(run: Any, step: int, keys: tuple[str, ...]) -> None:
    """Store two rewards of each prompt: 1 and 1 of easy ones, 0 and 0 of hard ones, else 1 and
    0."""
    add_rollouts(run.file, *(make_rollout(step, key, i) for key in keys for i in range(2)))
    rows = [
        (key, i, float(key in EASY or (key not in HARD and i == 0))) for key in keys for i in (0, 1)
    ]
    run.file.add_rewards(Split.TRAIN, step, make_rewards(rows))


async def take_steps(run: Any, first: int, last: int, late: bool) -> list[tuple[str, ...]]:
    """Return the draws of these steps. `late`: a step's rewards are stored only when a later plan
    could use them."""
    draws: dict[int, tuple[str, ...]] = {}
    waiting = first
    for step in range(first, last + 1):
        known = known_before(run, step) if late else step
        for earlier in range(waiting, min(known, step)):
            score(run, earlier, draws[earlier])
        waiting = max(waiting, min(known, step))
        draws[step] = await drawn_prompts(run, step)
    for step in range(waiting, last + 1):
        score(run, step, draws[step])
    return list(draws.values())


def epoch_of(draws: list[tuple[str, ...]], epoch: int) -> set[str]:
    return set().union(*draws[epoch * PER_EPOCH : (epoch + 1) * PER_EPOCH])


async def test_solved_and_unsolved_prompts_are_skipped_and_come_back(new_run: Any) -> None:
    run = new_run(0, skip_epochs=2)
    draws = await take_steps(run, 1, 4 * PER_EPOCH, late=False)
    left = set(KEYS) - {*EASY, *HARD}
    found = [epoch_of(draws, epoch) for epoch in range(4)]
    assert found == [set(KEYS), left, left, set(KEYS)]
    assert all(len(set(step)) == PER_STEP for step in draws)
    rates = await pass_rates(run, PER_EPOCH + 1)
    assert {key: rates[key].rate for key in (KEYS[0], KEYS[5], KEYS[-1])} == {
        KEYS[0]: 1.0,
        KEYS[5]: 0.5,
        KEYS[-1]: 0.0,
    }


async def test_draws_depend_neither_on_timing_nor_on_a_resume(new_run: Any) -> None:
    last, middle, staleness = 3 * PER_EPOCH, PER_EPOCH + 2, 1
    runs = [new_run(staleness, skip_epochs=2) for _ in range(2)]
    early = await take_steps(runs[0], 1, last, late=False)
    late = await take_steps(runs[1], 1, last, late=True)
    assert early == late
    runs[0].file.truncate_after(middle, middle, staleness)
    resumed = await take_steps(runs[0], middle + 1, last, late=True)
    assert resumed == early[middle:]
    assert epoch_of(early, 2) < set(KEYS)


async def test_without_a_curriculum_nothing_is_read(new_run: Any) -> None:
    run = new_run(0)
    run.config = run.config.model_copy(
        update={"data": run.config.data.model_copy(update={"curriculum": None})}
    )
    run.store = None
    assert await drawn_prompts(run, 5) == PromptLoader(KEYS, **GIVEN, portions=PORTIONS).prompts_of(
        5
    )
