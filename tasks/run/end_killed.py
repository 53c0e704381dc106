"""End a run whose process was killed before it could end the run itself."""

import os
from pathlib import Path

from refrain.engines.tracking.tracker import mark_killed
from refrain.tasks.run.run_dir import cleared_up


def end_killed(run_dir: Path, mlflow_dir: Path) -> None:
    """Clear up after a run, an evaluation or a profile, and mark it as killed in MLflow.

    `mlflow_dir`: the directory of MLflow's files, used without a server. Do nothing to a live run.
    """
    with cleared_up(run_dir) as was_killed:
        if was_killed:
            mark_killed(run_dir, os.environ.get("MLFLOW_TRACKING_URI"), mlflow_dir)
