"""The commands as functions, for `import refrain`: coroutines, which a notebook awaits where it
stands, and a script runs by `asyncio.run(refrain.train(config))`."""

from pathlib import Path

import pyarrow as pa

from engines.data.hub import with_local_model
from flows.checked import check_training
from flows.environment import use_embedded_services
from flows.own_server import own_server
from schemas.config import TrainConfig
from schemas.evaluation import EvaluateConfig, EvaluationReport
from schemas.step import RunSummary
from tasks.run.asking import ask_run
from tasks.run.record import find_run

RUNS = Path("runs")


class RunStore:
    """A run's record, to be asked in SQL while it trains or afterwards."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def sql(self, query: str, timeout_s: float = 60.0) -> pa.Table:
        """Answer to a query that reads; tables and views are those of `refrain sql`. Raises
        ValueError when it is refused, or takes longer, and RuntimeError when its process dies."""
        return ask_run(self.run_dir, query, timeout_s)


async def train(
    config: TrainConfig, *, resume: bool = False, overwrite: bool = False
) -> RunSummary:
    """Train, as `refrain train` does. Raises ValueError for bad input, before anything starts."""
    checked = check_training(with_local_model(config), resume, overwrite)
    checked.make_way()
    from flows.train import train as flow

    with own_server():
        return await flow(checked.config, resume)


async def evaluate(
    config: EvaluateConfig, *, resume: bool = False, overwrite: bool = False
) -> EvaluationReport:
    """Evaluate, as `refrain evaluate` does. Raises ValueError likewise."""
    use_embedded_services(config.runs_dir)
    from flows.evaluate import evaluate as flow

    with own_server():
        return await flow(config, resume, overwrite)


def open_run_store(run: str | Path, runs_dir: Path | str = RUNS) -> RunStore:
    """The store of a run, given by its name or directory. Raises ValueError when there is none."""
    return RunStore(find_run(str(run), Path(runs_dir)))
