"""The phases of a profile, one Prefect task each: measure, fit, record."""

import os
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.inference.profiling.drafter import ProfilingDrafter
from engines.inference.profiling.engine import ProfilingEngine
from engines.inference.profiling.profilers import Profilers
from engines.latency.accuracy import between_batches_accuracy, held_out_accuracy
from engines.latency.fitted import FittedLatency
from engines.latency.grid import decode_grid, draft_grid, shuffled, verify_grid
from engines.latency.profile_file import model_hash
from engines.learn.model_dir import check_model_dir
from engines.reports.progress import TerminalProgress
from engines.store.profiles import ProfileStore
from engines.tracking.tracker import record_profile
from schemas.base import with_absolute_paths
from schemas.config import EngineConfig, ModelConfig, RolloutConfig
from schemas.drafting import NGRAM, DraftModel, SpecActorConfig
from schemas.latency import Profile
from schemas.profile import (
    PROFILE_FILE,
    MachineFacts,
    Measurement,
    ProfileConfig,
    ProfileReport,
)
from tasks.run.preflight import check_draft_models
from tasks.run.ray_cluster import ray_cluster
from tasks.run.run_dir import CONFIG_FILE, claim_run_dir, delete_run

STORE_FILE = "profile.duckdb"
LONGEST_DEFAULT_CONTEXT = 16_384


@dataclass(frozen=True)
class ProfileRun:
    """A profile being made: what its tasks share."""

    config: ProfileConfig
    max_context: int
    store: ProfileStore
    progress: TerminalProgress
    num_gpus: int


_CURRENT: ContextVar[ProfileRun] = ContextVar("current_profile")


def read_profile_inputs(config: ProfileConfig) -> int:
    """The longest context to measure. Raises ValueError for what cannot be measured."""
    from transformers import AutoConfig

    check_model_dir(config.model)
    model = AutoConfig.from_pretrained(config.model, local_files_only=True).get_text_config()
    context = getattr(model, "max_position_embeddings", LONGEST_DEFAULT_CONTEXT)
    # The drafts of the last step, and vLLM's own look-ahead of as many.
    ahead = 2 * max(config.windows, default=0)
    room = context - ahead
    if config.max_context and config.max_context > room:
        raise ValueError(
            f"max_context is {config.max_context}, but {config.model} has a context of {context} "
            f"tokens, {room} beside draft windows of {max(config.windows, default=0)}: lower it"
        )
    for tp_degree in config.tp_degrees:
        if model.num_attention_heads % tp_degree:
            raise ValueError(
                f"tp_degree {tp_degree} does not divide the {model.num_attention_heads} attention "
                f"heads of {config.model}"
            )
    longest = config.max_context or min(room, LONGEST_DEFAULT_CONTEXT)
    check_draft_models(
        config.draft_models,
        config.model,
        "draft_models",
        longest + ahead,
        "max_context + twice the longest of windows",
    )
    decode_grid(1, config.max_batch, longest, config.max_batch * longest, _room(config))
    return longest


@asynccontextmanager
async def open_profile(config: ProfileConfig, overwrite: bool) -> AsyncGenerator[None]:
    """Validate, claim the profile's directory, start Ray; a directory with points goes on.

    Raises ValueError for bad input, before anything is started.
    """
    max_context = read_profile_inputs(config)
    if overwrite:
        delete_run(config.run_dir)
    with ExitStack() as stack:
        resume = (config.run_dir / CONFIG_FILE).exists()
        stack.callback(claim_run_dir(config, resume).release)
        store = ProfileStore(config.run_dir / STORE_FILE)
        stack.callback(store.close)
        progress = TerminalProgress()
        stack.callback(progress.close)
        wanted = gpus_wanted(config)
        what = "num_engines x the largest of tp_degrees, and num_engines of a draft model,"
        num_gpus = stack.enter_context(ray_cluster(config.run_dir.name, wanted, what))
        located = with_absolute_paths(config)
        token = _CURRENT.set(ProfileRun(located, max_context, store, progress, num_gpus))
        try:
            yield
        finally:
            _CURRENT.reset(token)


def gpus_wanted(config: ProfileConfig) -> int:
    """Engines of one kind are there at a time."""
    processes = [model.num_engines for model in config.draft_models]
    return max([config.num_engines * max(config.tp_degrees), *processes])


@task(cache_policy=NO_CACHE, task_run_name="measure TP {tp_degree}")
async def measure_decode(tp_degree: int) -> int:
    """Decode and prefill, on engines as rollouts without drafting have them.

    Returns the number of measurements that were still to be made.
    """
    return await _measure(
        f"TP {tp_degree}, decode and prefill",
        lambda run, facts: decode_todo(run, facts, tp_degree),
        lambda run: _engines(run, tp_degree, max_window=0),
    )


@task(cache_policy=NO_CACHE, task_run_name="measure drafting TP {tp_degree}")
async def measure_drafting(tp_degree: int) -> int:
    """Verify and draft by lookup, on engines that are ready for drafts. Returns as
    `measure_decode`."""
    return await _measure(
        f"TP {tp_degree}, verify and draft",
        lambda run, facts: drafting_todo(run, facts, tp_degree),
        lambda run: _engines(run, tp_degree, max(run.config.windows)),
    )


@task(cache_policy=NO_CACHE, task_run_name="measure {model.name}")
async def measure_draft_model(model: DraftModel) -> int:
    """Drafting by a small model, on processes as rollouts have them. Returns as
    `measure_decode`."""
    return await _measure(
        f"draft by {model.name}",
        lambda run, facts: draft_model_todo(run, facts, model.name),
        lambda run: _draft_processes(run, model),
    )


@task(cache_policy=NO_CACHE)
async def fit_profile() -> ProfileReport:
    """Fit the latency model, compare it with what it did not see, keep both."""
    run = _CURRENT.get()
    facts = run.store.facts()
    assert facts is not None, "nothing was measured"
    profile = Profile(
        model_name=run.config.model.resolve().name,
        model_hash=model_hash(run.config.model),
        hardware=facts.hardware,
        dtype=run.config.dtype,
        max_active_tokens=facts.max_active_tokens,
        points=run.store.points(),
        created_s=time.time(),
        versions=facts.versions,
    )
    held_out, between = held_out_accuracy(profile), between_batches_accuracy(profile)
    labelled = [("points", a) for a in held_out] + [("batches", a) for a in between]
    run.store.replace_fit(FittedLatency(profile).knots(), labelled)
    file = run.config.run_dir / PROFILE_FILE
    file.write_text(profile.model_dump_json(indent=1) + "\n")
    return ProfileReport(
        profile_file=file, profile=profile, held_out=held_out, between_batches=between
    )


@task(cache_policy=NO_CACHE)
async def record(report: ProfileReport) -> None:
    """Tables and pictures, beside the profile and in MLflow."""
    config = _CURRENT.get().config
    record_profile(report, config, os.environ.get("MLFLOW_TRACKING_URI"))


Todo = list[tuple[int, Measurement]]
"""(pass, measurement) that the store lacks."""


async def _measure(
    what: str,
    todo_of: Callable[[ProfileRun, MachineFacts], Todo],
    start: Callable[[ProfileRun], Profilers],
) -> int:
    run = _CURRENT.get()
    config, store = run.config, run.store
    facts = store.facts()
    if facts and not todo_of(run, facts):
        return 0
    profilers = start(run)
    run.progress.phase(f"{what}: starting {profilers.num_engines} engines")
    try:
        facts = store.check_facts(await profilers.start())
        todo = todo_of(run, facts)
        run.progress.phase(f"{what}: {len(todo)} points")
        if not todo:
            return 0
        warm_up = todo[0][1].model_copy(update={"batch": 1})
        await profilers.measure(warm_up, config.decode_steps, "warm-up")
        started_s = time.monotonic()
        for done, (pass_index, measurement) in enumerate(todo, start=1):
            seed = f"{config.seed}/{pass_index}"
            points = await profilers.measure(measurement, config.decode_steps, seed)
            store.add(pass_index, measurement, points)
            left_s = (time.monotonic() - started_s) / done * (len(todo) - done)
            run.progress.counting(done, len(todo), "points", left_s)
    finally:
        await profilers.shutdown()
    return len(todo)


def decode_todo(run: ProfileRun, facts: MachineFacts, tp_degree: int) -> Todo:
    """`config.passes` times, each in an order of its own."""
    return _lacking(run, _decode_grid(run, facts, tp_degree), run.config.passes)


def drafting_todo(run: ProfileRun, facts: MachineFacts, tp_degree: int) -> Todo:
    """Verification, and with the first TP degree drafting by lookup."""
    grid = _verify_grid(run, facts, tp_degree)
    lookups = draft_grid(grid, NGRAM) if tp_degree == run.config.tp_degrees[0] else []
    return _lacking(run, [*grid, *lookups], 1)


def draft_model_todo(run: ProfileRun, facts: MachineFacts, name: str) -> Todo:
    """Drafting by a small model, as many tokens as are verified with the first TP degree."""
    grid = _verify_grid(run, facts, run.config.tp_degrees[0])
    return _lacking(run, draft_grid(grid, name), 1)


def _decode_grid(run: ProfileRun, facts: MachineFacts, tp_degree: int) -> list[Measurement]:
    config = run.config
    return decode_grid(
        tp_degree, config.max_batch, run.max_context, facts.max_active_tokens, _room(config)
    )


def _verify_grid(run: ProfileRun, facts: MachineFacts, tp_degree: int) -> list[Measurement]:
    decode = _decode_grid(run, facts, tp_degree)
    return verify_grid(decode, run.config.windows, facts.max_step_tokens)


def _lacking(run: ProfileRun, grid: list[Measurement], num_passes: int) -> Todo:
    measured = run.store.measured()
    seed = run.config.seed
    return [
        (index, point)
        for index in range(num_passes)
        for point in shuffled(grid, random.Random(f"{seed}/{index}").getrandbits(32))
        if (index, point) not in measured
    ]


def _engines(run: ProfileRun, tp_degree: int, max_window: int) -> Profilers:
    config = run.config
    engine = _engine_config(config, tp_degree, run.max_context + 2 * max_window)
    return _profilers(
        run,
        ProfilingEngine,
        [(index, engine, max_window) for index in range(config.num_engines)],
        num_gpus_each=tp_degree,
    )


def _draft_processes(run: ProfileRun, model: DraftModel) -> Profilers:
    """Processes that draft by a small model, configured as a training run's."""
    length = run.max_context + 2 * max(run.config.windows)
    engine = _engine_config(run.config, 1, length, (model,))
    processes = [(process,) for process in engine.drafter_processes]
    return _profilers(run, ProfilingDrafter, processes, num_gpus_each=1)


def _profilers(
    run: ProfileRun, engine: type, arguments: list[tuple], num_gpus_each: int
) -> Profilers:
    return Profilers(
        engine,
        arguments,
        num_gpus_each=num_gpus_each if run.num_gpus else 0,
        start_timeout_s=run.config.start_timeout_s,
        point_timeout_s=run.config.point_timeout_s,
    )


def _room(config: ProfileConfig) -> int:
    """Tokens by which a sequence grows while it is measured, with warm-up."""
    return config.decode_steps + 8


def _engine_config(
    config: ProfileConfig,
    tp_degree: int,
    max_model_len: int,
    draft_models: tuple[DraftModel, ...] = (),
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=config.model, dtype=config.dtype),
        rollout=RolloutConfig(
            tp_degree=tp_degree,
            max_num_seqs=config.max_batch,
            kv_cache_bytes=config.kv_cache_bytes,
            enforce_eager=config.enforce_eager,
        ),
        max_model_len=max_model_len,
        seed=config.seed,
        specactor=SpecActorConfig(draft_models=draft_models),
    )
