"""Profile a model: measure it on this machine once, and fit the latency model.

This file is not called `profile.py`, because Prefect puts this directory on the path. It would hide
Python's module `profile`.
"""

from typing import Any

from prefect import flow

from refrain.engines.failures import Failures
from refrain.schemas.profile import ProfileConfig, ProfileReport
from refrain.tasks.profile import (
    end_profile,
    fit_profile,
    measure_decode,
    measure_draft_model,
    measure_drafting,
    open_profile,
    put_in_place,
    record,
)


def _on_end(flow: Any, flow_run: Any, state: Any) -> None:
    """End a profile that was cancelled or has crashed."""
    del flow, state
    end_profile(ProfileConfig.model_validate(flow_run.parameters["config"]))


@flow(flow_run_name="{config.model}", on_cancellation=[_on_end], on_crashed=[_on_end])
async def profile(config: ProfileConfig, overwrite: bool = False) -> ProfileReport:
    """Measure decode, prefill, verify and draft times and fit the latency model.

    Args:
        config: The model, and the range to measure.
        overwrite: Measure everything again. The earlier profile stays in use until then. Without
            this, continue an unfinished profile, or fit a finished one again. An interrupted
            profile always continues at the point where it was stopped.
    """
    with open_profile(config, overwrite) as run:
        num_measured = [await measure_decode(run, tp_degree) for tp_degree in config.tp_degrees]
        for tp_degree in config.tp_degrees if config.windows else ():
            num_measured.append(await measure_drafting(run, tp_degree))
        for model in run.config.draft_models:
            num_measured.append(await measure_draft_model(run, model))
        report = await fit_profile(run, num_measured)
        if run.anew:
            report = await put_in_place(config, report)
        with Failures(config.run_dir).contained("recording a profile"):
            await record(config, report)
        return report
