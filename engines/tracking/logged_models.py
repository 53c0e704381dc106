"""Log checkpoints as MLflow's logged models: their location and validation, not their weights."""

from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "checkpoint"
_VALIDATION = "validation/"


def model_name(step: int) -> str:
    """Return the name of a step's checkpoint among the logged models of its run."""
    return f"step-{step}"


def log_model(client: Any, run_id: str, step: int, tags: Mapping[str, str]) -> None:
    """Log a step's checkpoint with these tags and its known validation metrics. A second call with
    the same arguments changes nothing."""
    from mlflow.entities import LoggedModelStatus

    model = find_model(client, run_id, step)
    if model is None:
        experiment = client.get_run(run_id).info.experiment_id
        name = model_name(step)
        model = client.create_logged_model(experiment, name, run_id, model_type=MODEL_TYPE)
    client.set_logged_model_tags(model.model_id, dict(tags))
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    add_validation(client, run_id, step)


def add_validation(client: Any, run_id: str, step: int) -> None:
    """Copy the run's validation metrics of this step to the step's model, if it has one."""
    model = find_model(client, run_id, step)
    if model is None:
        return
    for name in client.get_run(run_id).data.metrics:
        if name.startswith(_VALIDATION):
            for metric in client.get_metric_history(run_id, name):
                if metric.step == step:
                    known = (metric.key, metric.value, metric.timestamp, step)
                    client.log_metric(run_id, *known, model_id=model.model_id)


def find_model(client: Any, run_id: str, step: int) -> Any | None:
    """Return the run's logged model of a step, or None."""
    experiment = client.get_run(run_id).info.experiment_id
    query = f"source_run_id = '{run_id}' AND name = '{model_name(step)}'"
    found = client.search_logged_models([experiment], filter_string=query, max_results=1)
    return found[0] if found else None
