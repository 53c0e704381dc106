"""The commands as functions, for `import refrain`.

`train` and `evaluate` are coroutines. A notebook awaits them directly. A script runs
`asyncio.run(refrain.train(config))`.
"""

from pathlib import Path

import pyarrow as pa

from refrain.flows.environment import use_embedded_services
from refrain.flows.own_server import own_server
from refrain.flows.prepare import make_way, training_plan
from refrain.schemas.config import TrainConfig
from refrain.schemas.evaluation import EvaluateConfig, EvaluationReport
from refrain.schemas.step import RunSummary
from refrain.tasks.run.find import find_run
from refrain.tasks.run.store_query import query_run

RUNS = Path("runs")


class RunStore:
    """A run's store, for SQL queries during training or afterwards."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def sql(self, query: str, timeout_s: float = 60.0) -> pa.Table:
        """Return the result of a read-only query. `refrain sql --help` lists tables and views.

        Raise ValueError when the query is refused or takes longer than `timeout_s` seconds, and
        RuntimeError when the process that runs it dies.
        """
        return query_run(self.run_dir, query, timeout_s)


async def train(
    config: TrainConfig, *, resume: bool = False, overwrite: bool = False
) -> RunSummary:
    """Train, like `refrain train`. Raise ValueError for bad input before anything starts."""
    plan = training_plan(config, resume, overwrite=overwrite)
    make_way(plan)
    from refrain.flows.train import train as flow

    with own_server():
        return await flow(plan.config, resume)


async def evaluate(
    config: EvaluateConfig, *, resume: bool = False, overwrite: bool = False
) -> EvaluationReport:
    """Evaluate, like `refrain evaluate`. Raise ValueError for bad input."""
    use_embedded_services(config.runs_dir)
    from refrain.flows.evaluate import evaluate as flow

    with own_server():
        return await flow(config, resume, overwrite)


def open_run_store(run: str | Path, runs_dir: Path | str = RUNS) -> RunStore:
    """Open the store of a run, given by name or directory. Raise ValueError when there is none."""
    return RunStore(find_run(str(run), Path(runs_dir)))
