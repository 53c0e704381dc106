"""index_history: what earlier rollouts taught."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from schemas.step import HistoryReport
from tasks.run import current_run


@task(cache_policy=NO_CACHE)
async def index_history(step: int) -> HistoryReport:
    """Count what is known of the prompts before this step."""
    return await current_run().store("history_report", step)
