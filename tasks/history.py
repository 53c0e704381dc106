"""index_history: build the suffix indexes over earlier rollouts."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from refrain.schemas.data import PassRate
from refrain.schemas.rollout import Split
from refrain.schemas.run import RunRef
from refrain.schemas.step import HistoryReport, RolloutBatch
from refrain.tasks.run.advice import run_task
from refrain.tasks.run.attach import Run, attach

WAIT_S = 60.0
"""Seconds that a step waits for its indexes. After that it drafts with the indexes it has."""


@run_task
async def index_history(ref: RunRef, step: int) -> HistoryReport:
    """Build the missing indexes of this step's prompts. Most were built during earlier steps
    (`prepare_history`)."""
    run = attach(ref)
    report: HistoryReport = await run.store("history_report", known_before(run, step))
    if not run.config.drafting.enabled:
        return report
    run.progress.phase(f"step {step}: looking up histories")
    started = time.perf_counter()
    num_indexed = await index_drawn(run, step, await drawn_prompts(run, step))
    wait_s = time.perf_counter() - started
    counts = {"indexes": run.history.counts(), "num_indexed": num_indexed, "wait_s": wait_s}
    return report.model_copy(update=counts)


async def drawn_prompts(run: Run, step: int) -> tuple[str, ...]:
    """Return the prompts that a step draws, in order. A resumed run gets the same."""
    return run.inputs.loader.prompts_of(step, await pass_rates(run, step))


async def pass_rates(run: Run, step: int) -> dict[str, PassRate]:
    """Return the pass rates that decide on the prompts of the step's epoch: those that were known
    when its first step was planned. Empty without a curriculum."""
    loader, data = run.inputs.loader, run.config.data
    if data.curriculum is None:
        return {}
    epoch = loader.epoch_of(step)
    since = loader.first_step(max(0, epoch - data.curriculum.skip_epochs))
    before = known_before(run, loader.first_step(epoch))
    found = await run.store("pass_rates", since, before, data.pass_score)
    return {key: PassRate(rate, loader.epoch_of(at)) for key, (rate, at) in found.items()}


def known_before(run: Run, step: int) -> int:
    """Return the first step that a plan of `step` must not use. All steps before it are trained
    whenever `step` is planned, so a resumed run makes the same plan.

    With `staleness`, a step is planned when the one before is queued, so that one's policy version
    is published: the version that is `staleness` + 2 steps older than `step`.
    """
    staleness = run.config.staleness
    return max(1, step - 1 - staleness) if staleness else step


async def last_known(run: Run, step: int) -> RolloutBatch | None:
    """Return the rollouts of the last step that a plan of `step` may use, or None."""
    return await run.store("stage", Split.TRAIN, known_before(run, step) - 1)


async def index_drawn(run: Run, step: int, prompt_keys: Sequence[str]) -> int:
    """Index the prompts of a training step. Return the number of prompts with an index."""
    # Use the newest rollouts. A resumed run may find others than the first try, but drafts change
    # no token. (A plan must not depend on the newest rollouts: see `known_before`.)
    newest = max(1, step - run.config.staleness)
    return await index_prompts(run, Split.TRAIN, newest, prompt_keys)


async def index_prompts(run: Run, split: Split, step: int, prompt_keys: Sequence[str]) -> int:
    """Index prompts from their last rollouts before `step`. Return the number of prompts with an
    index, or 0 after a timeout of WAIT_S."""
    wanted = await run.store("last_steps", split, prompt_keys, step)
    indexing = run.history.prepare(wanted, _reader(run, split))
    done, _ = await asyncio.wait([indexing], timeout=WAIT_S)
    if done:
        return indexing.result()
    run.progress.phase(f"indexing took longer than {WAIT_S:.0f} s: some prompts have no drafts")
    return 0


def prepare_history(run: Run, split: Split, steps: Mapping[str, int]) -> None:
    """Index rollouts in the background after scoring, for when their prompts return. `steps`: the
    step that drew each prompt."""
    if run.config.drafting.enabled:
        run.history.prepare(steps, _reader(run, split))


def _reader(run: Run, split: Split):
    async def read(steps: Mapping[str, int]) -> Any:
        return (await run.rows("index_rows", split, steps)).reference

    return read
