"""The step times of an engine, and the gate that decides by them which drafts pay."""

from typing import Any

from refrain.engines.histospec.gate import Gate, ProfiledStepTimes, StepTimes
from refrain.engines.histospec.step_times import PLAIN_SHARE, MeasuredStepTimes
from refrain.engines.latency.fitted import FittedLatency
from refrain.schemas.config import EngineConfig
from refrain.schemas.engine import EngineSetup
from refrain.schemas.latency import Profile


def times_and_gate(config: EngineConfig, setup: EngineSetup) -> tuple[MeasuredStepTimes, Gate]:
    """Return the times that the engine measures, and the gate. The gate goes by the run's profile
    if there is one, else by these times."""
    profile = setup.profile_json
    measured = MeasuredStepTimes(0.0 if profile else PLAIN_SHARE)
    times: StepTimes = measured
    if profile:
        latency = FittedLatency(Profile.model_validate_json(profile))
        times = ProfiledStepTimes(latency, config.rollout.tp_degree)
    return measured, Gate(times if config.drafting.gate else None)


def max_step_tokens(vllm_config: Any) -> int:
    """Return the most tokens of a step."""
    scheduler = vllm_config.scheduler_config
    return scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
