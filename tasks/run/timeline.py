"""Log a step's timeline, and the time that each technique saved."""

import asyncio

import pyarrow as pa

from refrain.engines.accounting.savings import (
    HOW_TO_KNOW,
    MEASURED,
    acted,
    engine_costs,
    measured_s,
    step_savings,
)
from refrain.engines.accounting.step_requests import StepRequest, step_moves, step_requests
from refrain.engines.pat.layouts import place_engines, plan_pools
from refrain.engines.reports.trace_events import read_timeline
from refrain.schemas.config import TrainConfig
from refrain.schemas.keys import stage_name
from refrain.schemas.step import RolloutBatch
from refrain.schemas.timeline import RecordedTimeline, Savings
from refrain.tasks.run.attach import Run


async def log_timeline(run: Run, batch: RolloutBatch, rows: pa.Table) -> Savings | None:
    """Log a page about a scored rollout stage. Return its savings. `rows`: the result of
    `Store.timed_rollouts`."""
    name = stage_name(batch.split, batch.step)
    recorded = read_timeline(run.config.run_dir, name)
    requests, savings = await asyncio.to_thread(_account, run, batch, recorded, rows)
    recorded = RecordedTimeline(recorded.timeline, recorded.clock_zero_s, batch.shares, savings)
    gpus = gpus_of(run.config)
    await asyncio.to_thread(run.tracker.log_timeline_page, recorded, name, requests, gpus)
    return savings


def _account(
    run: Run, batch: RolloutBatch, recorded: RecordedTimeline, rows: pa.Table
) -> tuple[list[StepRequest], Savings | None]:
    requests = step_requests(recorded, batch.split, batch.step, rows.to_pylist())
    return requests, _savings(run, batch, recorded, requests)


def gpus_of(config: TrainConfig) -> dict[int, tuple[int, ...]]:
    """Return the GPUs of each rollout engine. Engines of different layouts share GPUs."""
    rollout, pat = config.rollout, config.pat
    _, specs = plan_pools(rollout.num_engines, rollout.tp_degree, pat.tp_degrees, pat.gpus_per_node)
    return place_engines(specs)


def _savings(
    run: Run, batch: RolloutBatch, recorded: RecordedTimeline, requests: list[StepRequest]
) -> Savings | None:
    timeline = recorded.timeline
    moves = step_moves(timeline, batch.split, batch.step)
    if not requests or not acted(requests, moves):
        return None
    latency = run.inputs.latency
    source = f"profile={run.config.profile}" if latency else MEASURED
    try:
        costs = engine_costs(requests, batch.shares, timeline.tp_degrees, latency)
        return step_savings(requests, moves, costs, source, run.config.rollout.max_num_seqs)
    except ValueError as error:
        techniques = ", ".join(acted(requests, moves))
        unknown = f"the savings of {techniques} are not known: {error}; {HOW_TO_KNOW}"
        return Savings(measured_s(requests), unknown=unknown)
