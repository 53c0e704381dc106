"""Profiling: measure a model on this machine once, fit the latency model.

Not `profile.py`: Prefect puts this directory on the path, where that would hide Python's own.
"""

from prefect import flow

from schemas.profile import ProfileConfig, ProfileReport
from tasks.profile import (
    fit_profile,
    measure_decode,
    measure_draft_model,
    measure_drafting,
    open_profile,
    record,
)


@flow(flow_run_name="{config.model}")
async def profile(config: ProfileConfig, overwrite: bool = False) -> ProfileReport:
    """Measure decode, prefill, verify and draft times and fit the latency model.

    Args:
        config: Which model, and over what range.
        overwrite: Measure anew what is there. Otherwise an unfinished profile goes on, and a
            finished one is fitted again.
    """
    with open_profile(config, overwrite) as run:
        for tp_degree in config.tp_degrees:
            await measure_decode(run, tp_degree)
        for tp_degree in config.tp_degrees if config.windows else ():
            await measure_drafting(run, tp_degree)
        for model in run.config.draft_models:
            await measure_draft_model(run, model)
        report = await fit_profile(run)
        await record(run, report)
        return report
