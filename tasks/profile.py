"""The phases of a profile as Prefect tasks: measure, fit, record."""

import os
import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from refrain.engines.durable import write_durably
from refrain.engines.failures import Failures
from refrain.engines.inference.profiling.drafter import ProfilingDrafter
from refrain.engines.inference.profiling.engine import ProfilingEngine
from refrain.engines.inference.profiling.profilers import Profilers
from refrain.engines.latency.accuracy import between_batches_accuracy, held_out_accuracy
from refrain.engines.latency.fitted import FittedLatency
from refrain.engines.latency.grid import decode_grid, draft_grid, shuffled, verify_grid
from refrain.engines.latency.profile_file import model_hash
from refrain.engines.reports.progress import Everywhere, TerminalProgress
from refrain.engines.store.profiles import ProfileStore
from refrain.engines.tracking.tracker import record_profile
from refrain.schemas.base import with_absolute_paths
from refrain.schemas.config import EngineConfig, ModelConfig, RolloutConfig
from refrain.schemas.drafting import NGRAM, DraftModel, SpecActorConfig
from refrain.schemas.latency import Profile
from refrain.schemas.profile import (
    PROFILE_FILE,
    MachineFacts,
    Measurement,
    ProfileConfig,
    ProfileReport,
    ProfileRun,
)
from refrain.tasks.profile_inputs import beside, gpus_wanted, read_profile_inputs, room_to_grow
from refrain.tasks.profile_shards import measured_by, of_all_ranks, write_shards
from refrain.tasks.run.config_record import write_config
from refrain.tasks.run.ray_cluster import ray_cluster
from refrain.tasks.run.run_dir import (
    CONFIG_FILE,
    check_deletable,
    check_run_dir,
    claim_run_dir,
    clear_up,
    delete_run,
    hold_run_dir,
    replace_run,
)
from refrain.tasks.run.run_log import RunLog

STORE_FILE = "profile.duckdb"


@contextmanager
def open_profile(config: ProfileConfig, overwrite: bool) -> Generator[ProfileRun]:
    """Validate, claim the profile's directory and start Ray. Continue a directory that has points.

    With `overwrite`, measure in a second directory. The earlier profile stays in use until
    `put_in_place` moves the new one there. Raise ValueError for bad input before anything starts.
    """
    max_context = read_profile_inputs(config)
    with ExitStack() as stack:
        if overwrite:
            check_deletable(config.run_dir, ProfileConfig)
            stack.callback(hold_run_dir(config.run_dir).release)
            config = beside(config)
            _forget_others(config)
        resume = (config.run_dir / CONFIG_FILE).exists()
        stack.callback(claim_run_dir(config, resume).release)
        write_shards(config)
        placement = stack.enter_context(ray_cluster(config.run_dir.name, gpus_wanted(config)))
        num_gpus, located = placement.num_gpus, with_absolute_paths(config)
        yield ProfileRun(config=located, max_context=max_context, num_gpus=num_gpus, anew=overwrite)


def _forget_others(config: ProfileConfig) -> None:
    """Delete an unfinished profile in this directory if its settings differ."""
    if (config.run_dir / CONFIG_FILE).exists():
        try:
            check_run_dir(config, resume=True)
        except ValueError:
            delete_run(config.run_dir, ProfileConfig)


def end_profile(config: ProfileConfig) -> None:
    """Clear up after a profile whose process was killed: kill the processes that it left."""
    for each in (config, beside(config)):
        clear_up(each.run_dir)


@task(cache_policy=NO_CACHE, task_run_name="measure TP {tp_degree}")
async def measure_decode(run: ProfileRun, tp_degree: int) -> int:
    """Measure decode and prefill on engines without drafting.

    Return the number of measurements that this call made.
    """
    return await _measure(
        run,
        tp_degree,
        f"TP {tp_degree}, decode and prefill",
        partial(decode_points, run, tp_degree),
        partial(_engines, run, tp_degree, max_window=0),
    )


@task(cache_policy=NO_CACHE, task_run_name="measure drafting TP {tp_degree}")
async def measure_drafting(run: ProfileRun, tp_degree: int) -> int:
    """Measure verification, and drafting by lookup, on engines with drafting. Return the number of
    measurements, like `measure_decode`."""
    return await _measure(
        run,
        tp_degree,
        f"TP {tp_degree}, verify and draft",
        partial(drafting_points, run, tp_degree),
        partial(_engines, run, tp_degree, max(run.config.windows)),
    )


@task(cache_policy=NO_CACHE, task_run_name="measure {model.name}")
async def measure_draft_model(run: ProfileRun, model: DraftModel) -> int:
    """Measure drafting by a draft model, on processes like those of a run. Return the number of
    measurements, like `measure_decode`."""
    return await _measure(
        run,
        run.config.tp_degrees[0],
        f"draft by {model.name}",
        partial(draft_model_points, run, model.name),
        partial(_draft_processes, run, model),
    )


@task(cache_policy=NO_CACHE)
async def fit_profile(run: ProfileRun, num_measured: Sequence[int]) -> ProfileReport:
    """Fit the latency model, compare it with held-out points, and write both. `num_measured`: the
    results of the tasks before, so that Prefect waits for them."""
    del num_measured  # The points are in the store.
    config = run.config
    with _open_store(config) as store:
        of_degrees = {tp: of for tp in config.tp_degrees if (of := store.facts(tp))}
        facts = of_degrees.get(config.tp_degrees[0])
        assert facts is not None, "nothing was measured"
        profile = Profile(
            model_name=config.model.resolve().name,
            model_hash=model_hash(config.model),
            hardware=facts.hardware,
            links=config.shards,
            dtype=config.dtype,
            max_active_tokens=facts.max_active_tokens,
            active_tokens_of={tp: of.max_active_tokens for tp, of in of_degrees.items()},
            points=store.points(),
            created_s=time.time(),
            versions=facts.versions,
        )
        held_out, between = held_out_accuracy(profile), between_batches_accuracy(profile)
        labelled = [("points", a) for a in held_out] + [("batches", a) for a in between]
        store.replace_fit(FittedLatency(profile).knots(), labelled)
    file = config.run_dir / PROFILE_FILE
    write_durably(file, profile.model_dump_json(indent=1) + "\n")
    return ProfileReport(
        profile_file=file, profile=profile, held_out=held_out, between_batches=between
    )


@task(cache_policy=NO_CACHE)
async def put_in_place(config: ProfileConfig, report: ProfileReport) -> ProfileReport:
    """Replace the earlier profile by the new one, which was measured in a second directory."""
    measured = report.profile_file.parent
    write_config(measured, config)
    replace_run(config.run_dir, measured)
    return report.model_copy(update={"profile_file": config.run_dir.absolute() / PROFILE_FILE})


@task(cache_policy=NO_CACHE, retries=3, retry_delay_seconds=[2, 10, 60])
async def record(config: ProfileConfig, report: ProfileReport) -> None:
    """Write tables and pictures beside the profile and to MLflow. Retry if its server does not
    answer."""
    record_profile(report, config, os.environ.get("MLFLOW_TRACKING_URI"))


Points = list[tuple[int, Measurement]]
"""(pass, measurement), in the order of measurement."""


async def _measure(
    run: ProfileRun,
    tp_degree: int,
    what: str,
    points_of: Callable[[MachineFacts], Points],
    start: Callable[[], Profilers],
) -> int:
    """Measure the points that the store lacks, as far as engines of this TP degree allow them.
    Return their number."""
    config = run.config
    of_ranks = of_all_ranks(config)
    with _open_store(config) as store, closing(TerminalProgress()) as terminal:
        progress = Everywhere(Failures(config.run_dir, terminal.warn), terminal, RunLog())
        facts = store.facts(tp_degree)
        if facts and store.measured().issuperset(points_of(facts)):
            return 0
        profilers = start()
        progress.phase(f"{what}: starting {profilers.num_engines} engines")
        try:
            facts = store.check_facts(await profilers.start(), tp_degree, anew=run.anew)
            measured = store.measured()
            todo = [point for point in points_of(facts) if point not in measured]
            progress.phase(f"{what}: {len(todo)} points")
            if not todo:
                return 0
            warm_up = todo[0][1].model_copy(update={"batch": 1})
            await profilers.measure(warm_up, config.decode_steps, "warm-up")
            started_s = time.monotonic()
            for done, (pass_index, measurement) in enumerate(todo, start=1):
                seed = f"{config.seed}/{pass_index}"
                points = await profilers.measure(measurement, config.decode_steps, seed)
                store.add(pass_index, measurement, list(map(of_ranks, points)))
                left_s = (time.monotonic() - started_s) / done * (len(todo) - done)
                terminal.counting(done, len(todo), "points", left_s)
        finally:
            await profilers.shutdown()
    return len(todo)


def _open_store(config: ProfileConfig) -> closing[ProfileStore]:
    """Open a profile's store for the duration of a task."""
    return closing(ProfileStore(config.run_dir / STORE_FILE))


def decode_points(run: ProfileRun, tp_degree: int, facts: MachineFacts) -> Points:
    """Return the grid of decode and prefill `config.passes` times, each time in another order."""
    return _in_passes(run.config, _decode_grid(run, tp_degree, facts), run.config.passes)


def drafting_points(run: ProfileRun, tp_degree: int, facts: MachineFacts) -> Points:
    """Return the points of verification. Add drafting by lookup for the first TP degree."""
    grid = _verify_grid(run, tp_degree, facts)
    lookups = draft_grid(grid, NGRAM) if tp_degree == run.config.tp_degrees[0] else []
    return _in_passes(run.config, [*grid, *lookups], 1)


def draft_model_points(run: ProfileRun, name: str, facts: MachineFacts) -> Points:
    """Return the points of drafting by a model, for the windows that the first TP degree
    verifies."""
    grid = _verify_grid(run, run.config.tp_degrees[0], facts)
    return _in_passes(run.config, draft_grid(grid, name), 1)


def _decode_grid(run: ProfileRun, tp_degree: int, facts: MachineFacts) -> list[Measurement]:
    config = run.config
    return decode_grid(
        tp_degree, config.max_batch, run.max_context, facts.max_active_tokens, room_to_grow(config)
    )


def _verify_grid(run: ProfileRun, tp_degree: int, facts: MachineFacts) -> list[Measurement]:
    decode = _decode_grid(run, tp_degree, facts)
    return verify_grid(decode, run.config.windows, facts.max_step_tokens)


def _in_passes(config: ProfileConfig, grid: list[Measurement], num_passes: int) -> Points:
    return [
        (index, point)
        for index in range(num_passes)
        for point in shuffled(grid, random.Random(f"{config.seed}/{index}").getrandbits(32))
    ]


def _engines(run: ProfileRun, tp_degree: int, max_window: int) -> Profilers:
    engine = _engine_config(run, tp_degree, max_window)
    arguments = [(index, engine, max_window) for index in range(run.config.num_engines)]
    return _profilers(run, ProfilingEngine, arguments, engine.rollout.tp_degree)


def _draft_processes(run: ProfileRun, model: DraftModel) -> Profilers:
    """Return processes with a draft model, configured like those of a training run."""
    engine = _engine_config(run, 1, max(run.config.windows), (model,))
    processes = [(process,) for process in engine.drafter_processes]
    return _profilers(run, ProfilingDrafter, processes, 1)


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


def _engine_config(
    run: ProfileRun, tp_degree: int, max_window: int, draft_models: tuple[DraftModel, ...] = ()
) -> EngineConfig:
    config = run.config
    path, ranks = measured_by(config, tp_degree)
    return EngineConfig(
        model=ModelConfig(
            path=path, dtype=config.dtype, trust_remote_code=config.trust_remote_code
        ),
        rollout=RolloutConfig(
            tp_degree=ranks,
            max_num_seqs=config.max_batch,
            kv_cache_bytes=config.kv_cache_bytes,
            enforce_eager=config.enforce_eager,
        ),
        max_model_len=run.max_context + 2 * max_window,
        seed=config.seed,
        specactor=SpecActorConfig(draft_models=draft_models),
    )
