"""The phases of a profile, one Prefect task each: measure, fit, record."""

import os
import random
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.latency.accuracy import between_batches_accuracy, held_out_accuracy
from engines.latency.fitted import FittedLatency
from engines.latency.grid import decode_grid, shuffled, speculation_grid
from engines.latency.profile_file import model_hash
from engines.learn.model_dir import check_model_dir
from engines.report.profile import record_profile
from engines.report.progress import TerminalProgress
from engines.rollout.profilers import Profilers
from engines.rollout.profiling import NGRAM
from engines.store.profiles import ProfileStore
from schemas.config import EngineConfig, ModelConfig, RolloutConfig
from schemas.latency import Profile
from schemas.profile import (
    PROFILE_FILE,
    MachineFacts,
    Measurement,
    ProfileConfig,
    ProfileReport,
)
from tasks.ray_cluster import ray_cluster
from tasks.run_dir import CONFIG_FILE, claim_run_dir, delete_run

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
    room = context - 2 * max(config.windows, default=0)
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
        wanted = config.num_engines * max(config.tp_degrees)
        num_gpus = stack.enter_context(
            ray_cluster(config.run_dir.name, wanted, "num_engines x the largest of tp_degrees")
        )
        token = _CURRENT.set(ProfileRun(config, max_context, store, progress, num_gpus))
        try:
            yield
        finally:
            _CURRENT.reset(token)


@task(cache_policy=NO_CACHE, task_run_name="measure TP {tp_degree}")
async def measure_decode(tp_degree: int) -> int:
    """Decode and prefill, on engines as rollouts without drafting have them.

    Returns the number of measurements that were still to be made.
    """
    return await _measure(tp_degree, drafting=False)


@task(cache_policy=NO_CACHE, task_run_name="measure drafting TP {tp_degree}")
async def measure_drafting(tp_degree: int) -> int:
    """Verify and draft, on engines that are ready for drafts. Returns as `measure_decode`."""
    return await _measure(tp_degree, drafting=True)


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


async def _measure(tp_degree: int, drafting: bool) -> int:
    run = _CURRENT.get()
    config, store = run.config, run.store
    facts = store.facts()
    if facts and not (todo := _todo(run, tp_degree, drafting, facts)):
        return 0
    what = f"TP {tp_degree}, {'verify and draft' if drafting else 'decode and prefill'}"
    run.progress.phase(f"{what}: starting {config.num_engines} engines")
    max_window = max(config.windows) if drafting else 0
    profilers = Profilers(
        _engine_config(config, tp_degree, run.max_context + 2 * max_window),
        num_engines=config.num_engines,
        num_gpus_each=tp_degree if run.num_gpus else 0,
        max_window=max_window,
        start_timeout_s=config.start_timeout_s,
        point_timeout_s=config.point_timeout_s,
    )
    try:
        facts = store.check_facts(await profilers.start())
        todo = _todo(run, tp_degree, drafting, facts)
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


def _todo(
    run: ProfileRun, tp_degree: int, drafting: bool, facts: MachineFacts
) -> list[tuple[int, Measurement]]:
    """(pass, measurement) that the store lacks."""
    config = run.config
    grid = decode_grid(
        tp_degree, config.max_batch, run.max_context, facts.max_active_tokens, _room(config)
    )
    if drafting:
        # Drafting does not depend on the TP degree.
        drafters = [NGRAM] if tp_degree == config.tp_degrees[0] else []
        grid = speculation_grid(grid, config.windows, drafters, facts.max_step_tokens)
    measured = run.store.measured()
    return [
        (index, point)
        for index in range(1 if drafting else config.passes)
        for point in shuffled(grid, random.Random(f"{config.seed}/{index}").getrandbits(32))
        if (index, point) not in measured
    ]


def _room(config: ProfileConfig) -> int:
    """Tokens by which a sequence grows while it is measured, with warm-up."""
    return config.decode_steps + 8


def _engine_config(config: ProfileConfig, tp_degree: int, max_model_len: int) -> EngineConfig:
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
    )
