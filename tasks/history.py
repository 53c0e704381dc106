"""index_history: what earlier rollouts taught."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.rollout import Split
from schemas.run import RunRef
from schemas.step import HistoryReport, RolloutBatch
from tasks.run.advice import run_task
from tasks.run.attach import Run, attach

WAIT_S = 60.0
"""Longest time that a step waits for its indexes; it drafts with what there is then."""


@run_task
async def index_history(ref: RunRef, step: int) -> HistoryReport:
    """Have an index of each prompt of this step that was rolled out before. Most were built while
    the last steps trained (`prepare_history`)."""
    run = attach(ref)
    report: HistoryReport = await run.store("history_report", known_before(run, step))
    if not run.config.drafting.enabled:
        return report
    run.progress.phase(f"step {step}: looking up histories")
    started = time.perf_counter()
    num_indexed = await index_drawn(run, step, run.inputs.loader.prompts_of(step))
    wait_s = time.perf_counter() - started
    counts = {"indexes": run.history.counts(), "num_indexed": num_indexed, "wait_s": wait_s}
    return report.model_copy(update=counts)


def known_before(run: Run, step: int) -> int:
    """Steps before this one are trained when `step` is planned, whenever that is, so a plan is the
    same in a run that is resumed: in a pipeline the step before goes on, and the one before that
    may."""
    return max(1, step - 2 * run.config.max_staleness)


async def last_known(run: Run, step: int) -> RolloutBatch | None:
    """Rollouts of the last step that is known when `step` is planned; None before the first."""
    return await run.store("stage", Split.TRAIN, known_before(run, step) - 1)


async def index_drawn(run: Run, step: int, prompt_keys: Sequence[str]) -> int:
    """Index prompts that a training step draws; returns how many have one."""
    # The newest there is, where a prompt returns so soon: a plan must be the same in a run that is
    # resumed, tokens are whatever drafts.
    newest = max(1, step - run.config.max_staleness)
    return await index_prompts(run, Split.TRAIN, newest, prompt_keys)


async def index_prompts(run: Run, split: Split, step: int, prompt_keys: Sequence[str]) -> int:
    """Index these prompts from their last rollouts before `step`; returns how many have one."""
    wanted = await run.store("last_steps", split, prompt_keys, step)
    indexing = run.history.prepare(wanted, _reader(run, split))
    done, _ = await asyncio.wait([indexing], timeout=WAIT_S)
    if done:
        return indexing.result()
    run.progress.phase(f"histories took longer than {WAIT_S:.0f} s: drafting without some")
    return 0


def prepare_history(run: Run, split: Split, steps: Mapping[str, int]) -> None:
    """Index what was just scored, in the background: it drafts when these prompts return. `steps`:
    the step that drew each prompt."""
    if run.config.drafting.enabled:
        run.history.prepare(steps, _reader(run, split))


def _reader(run: Run, split: Split):
    async def read(steps: Mapping[str, int]) -> Any:
        return (await run.rows("index_rows", split, steps)).reference

    return read
