"""Simulate every division of a run's GPUs between engines and trainer, and find the fastest. Pure.

Shared: engines and trainer take turns on all GPUs, as far as these form whole TP groups. This is
simulated in sync mode.

Split: engines have some GPUs, in whole TP groups, and the trainer has the others. Every such
division is simulated in sync mode, where one waits for the other, and in pipelined mode.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from refrain.engines.histospec.gate import ProfiledStepTimes
from refrain.engines.latency.hardware import Hardware
from refrain.engines.latency.interface import Latency
from refrain.engines.latency.model_shape import ModelShape
from refrain.engines.machine.shared_gpu import SharedGpu
from refrain.engines.machine.trainer_memory import Training, resting_bytes, trainer_footprint
from refrain.engines.pat.memory import gpu_footprint
from refrain.engines.simulate.cluster import PolicySet, known_acceptances, step_requests
from refrain.engines.simulate.consecutive_steps import LAG, CourseStep, CourseTimes, run_course
from refrain.engines.simulate.engine import SwitchTimes, VirtualEngine
from refrain.engines.simulate.handover import Handover, estimate_handover, gpu_seconds_of_token
from refrain.engines.simulate.history import replay_step
from refrain.engines.simulate.member import Acceptance, Passes
from refrain.engines.simulate.trace import Trace
from refrain.engines.simulate.turns import recorded_turns
from refrain.schemas.rollout import RequestId, Turn
from refrain.schemas.simulate import ClusterLayout, DividedRun, Division
from refrain.schemas.trainer import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class DividedScene:
    """A trace, and the GPUs, engine and model with which its divisions are simulated."""

    trace: Trace
    steps: Sequence[int]
    num_gpus: int
    layout: ClusterLayout
    """TP degree and limits of one engine."""
    latency: Latency
    hardware: Hardware
    shape: ModelShape
    gpu_s_per_token: float | None = None
    """Measured GPU-seconds of training per token; None: by the formula."""
    acceptance: float | None = None
    handover: Handover | None = None
    """Seconds of every hand-over; None: by the formula."""

    @property
    def train_gpu_s(self) -> float:
        """GPU-seconds of training per token."""
        return self.gpu_s_per_token or gpu_seconds_of_token(self.shape, self.hardware)

    @cached_property
    def histories(self) -> Mapping[int, Mapping[str, float]]:
        """Median lengths of earlier responses by step and prompt key."""
        return {step: self.trace.history(step) for step in self.steps}

    @cached_property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt with its response."""
        rows = self.trace
        return int((rows.column("prompt_tokens") + rows.column("response_tokens")).max())


@dataclass(frozen=True, slots=True)
class _Script:
    """The steps of a simulation, with the lengths and drafting results that engines replay."""

    steps: tuple[CourseStep, ...]
    lengths: Mapping[RequestId, int]
    acceptances: Mapping[RequestId, Acceptance]
    replays: Mapping[RequestId, Passes]
    turns: Mapping[RequestId, tuple[Turn, ...]]


def divisions(num_gpus: int, tp_degree: int) -> tuple[Division, ...]:
    """Return all divisions of so many GPUs. Raise ValueError if they are too few for an engine."""
    if num_gpus < tp_degree:
        raise ValueError(f"{num_gpus} GPUs are too few for an engine of TP {tp_degree}")
    whole = num_gpus // tp_degree * tp_degree
    shared = Division(mode="sync", placement="shared", engine_gpus=whole, trainer_gpus=whole)
    split = [
        Division(mode=mode, placement="split", engine_gpus=num, trainer_gpus=num_gpus - num)
        for mode in LAG
        for num in range(tp_degree, num_gpus, tp_degree)
    ]
    return (shared, *split)


def simulate_divisions(scene: DividedScene, policy_set: PolicySet) -> Iterator[DividedRun]:
    """Simulate every division of the scene's GPUs in turn. Deterministic."""
    for division in divisions(scene.num_gpus, scene.layout.tp_degree):
        yield simulate_division(scene, policy_set, division)


def simulate_division(scene: DividedScene, policy_set: PolicySet, division: Division) -> DividedRun:
    tp_degree, lag = scene.layout.tp_degree, LAG[division.mode]
    shared, num_engines = division.placement == "shared", division.engine_gpus // tp_degree
    gpu = _shared_gpu(scene, division)
    handover = scene.handover or estimate_handover(
        scene.shape,
        scene.hardware,
        _training(scene, division),
        tp_degree,
        shared=shared,
        state_leaves=gpu.state_leaves,
    )
    script = _read_script(scene, policy_set, num_engines, lag, division.trainer_gpus)
    engines = [
        VirtualEngine(
            index,
            tp_degree,
            scene.latency,
            script.lengths,
            acceptances=script.acceptances,
            replays=script.replays or None,
            turns=script.turns,
            max_num_seqs=scene.layout.max_num_seqs,
            max_context_tokens=scene.layout.max_context_tokens,
            report_s=policy_set.report_s,
            sync_s=handover.weights_in_s,
            switch=SwitchTimes(wake_s=handover.wake_s, sleep_s=handover.sleep_s),
        )
        for index in range(num_engines)
    ]
    times = run_course(script.steps, engines, policy_set, handover, lag=lag, shared=shared)
    measured = script.steps[lag:]
    return DividedRun(
        policy_set=policy_set.name,
        division=division,
        num_gpus=scene.num_gpus,
        num_steps=len(measured),
        num_rollouts=sum(step.num_rollouts for step in measured),
        seconds=times.seconds,
        rollout_s=times.rollout_s,
        train_s=times.train_s,
        idle_share=_idle_share(scene, division, engines, times),
        lacks=_lacks(gpu, division),
    )


def fastest(runs: Iterable[DividedRun], mode: str | None = None) -> DividedRun | None:
    """Return the run with the shortest step among those that fit, of one mode or of all. Return the
    first of several, or None when no run fits."""
    fitting = (run for run in runs if not run.lacks and mode in (None, run.division.mode))
    return min(fitting, key=lambda run: run.step_s, default=None)


def _read_script(
    scene: DividedScene, policy_set: PolicySet, num_engines: int, lag: int, trainer_gpus: int
) -> _Script:
    """Return the script of the scene's steps. The last `lag` steps come first too, as warm-up."""
    known = list(scene.steps)
    order = [known[place % len(known)] for place in range(-lag, len(known))]
    times = ProfiledStepTimes(scene.latency, scene.layout.tp_degree)
    steps: list[CourseStep] = []
    lengths: dict[RequestId, int] = {}
    acceptances: dict[RequestId, Acceptance] = {}
    replays: dict[RequestId, Passes] = {}
    turns: dict[RequestId, tuple[Turn, ...]] = {}
    for place, step in enumerate(order, start=1):
        rows = scene.trace.step(step)
        requests, of_step = step_requests(rows, place)
        lengths |= of_step
        turns |= zip(of_step, recorded_turns(rows.table), strict=True)
        acceptances |= known_acceptances(rows, of_step, scene.acceptance)
        if policy_set.histospec:
            num_parts = max(num_engines, -(-len(rows) // scene.layout.max_num_seqs))
            past = scene.trace.before(step)
            passes = replay_step(rows, past, policy_set.histospec, times, num_parts)
            replays |= {replace(id, step=place): found for id, found in passes.items()}
        tokens = int((rows.column("prompt_tokens") + rows.column("response_tokens")).sum())
        train_s = tokens * scene.train_gpu_s / trainer_gpus
        steps.append(CourseStep(requests, scene.histories[step], train_s))
    return _Script(tuple(steps), lengths, acceptances, replays, turns)


def _training(scene: DividedScene, division: Division) -> Training:
    """Return the defaults of a trainer, with micro-batches that hold the longest sample."""
    defaults = TrainerConfig()
    tokens = max(defaults.micro_batch_tokens, scene.longest_tokens)
    return Training(division.trainer_gpus, tokens, tokens, gradient_checkpointing=True)


def _shared_gpu(scene: DividedScene, division: Division) -> SharedGpu:
    shape, tp_degree = scene.shape, scene.layout.tp_degree
    training = _training(scene, division)
    shards = min(tp_degree, shape.num_kv_heads)
    kv_bytes = (scene.layout.max_context_tokens or 0) * shape.kv_bytes_per_token / shards
    return SharedGpu(
        engine=gpu_footprint(shape.weight_bytes, (tp_degree,), kv_bytes, resident=True),
        num_layouts=1,
        trainer=trainer_footprint(shape, training),
        resting_bytes=resting_bytes(shape, training),
        gpu_bytes=scene.hardware.memory_bytes,
    )


def _lacks(gpu: SharedGpu, division: Division) -> str:
    """Return why a trainer rank does not fit, or an empty text. Engines always fit, because their
    KV cache takes the memory that is left."""
    asleep = gpu.asleep_bytes if division.placement == "shared" else 0.0
    needed = gpu.trainer.bytes + asleep
    if needed <= gpu.usable_bytes:
        return ""
    return (
        f"one of {division.trainer_gpus} trainer ranks needs {needed / 1e9:.0f} of the "
        f"{gpu.usable_bytes / 1e9:.0f} GB that can be used"
    )


def _idle_share(
    scene: DividedScene,
    division: Division,
    engines: Sequence[VirtualEngine],
    times: CourseTimes,
) -> float:
    generating = sum(
        max(0.0, min(interval.end_s, times.end_s) - max(interval.start_s, times.start_s))
        for engine in engines
        for interval in engine.intervals
    )
    training = sum(end_s - start_s for start_s, end_s in times.training_s)
    busy = scene.layout.tp_degree * generating + division.trainer_gpus * training
    return max(0.0, 1.0 - busy / (scene.num_gpus * times.seconds))
