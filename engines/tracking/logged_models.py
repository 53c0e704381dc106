"""Checkpoints as MLflow's logged models: where they lie, with their validation; no weights."""

from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "checkpoint"
_VALIDATION = "validation/"


def model_name(step: int) -> str:
    """Name of a step's checkpoint among the models of its run."""
    return f"step-{step}"


def log_model(client: Any, run_id: str, step: int, tags: Mapping[str, str]) -> None:
    """Have a model of this step with these tags, and with what is known of its validation. Twice
    does no harm."""
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
    """Give the model of this step, where there is one, what the run has of its validation."""
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
    """The run's model of a step."""
    experiment = client.get_run(run_id).info.experiment_id
    query = f"source_run_id = '{run_id}' AND name = '{model_name(step)}'"
    found = client.search_logged_models([experiment], filter_string=query, max_results=1)
    return found[0] if found else None
