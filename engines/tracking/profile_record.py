"""A profile in MLflow: its points, how well the fit predicts them, and its pictures."""

from engines.reports.ladder import Rung, ladder_rungs
from engines.reports.profile import draw_profile
from engines.tracking.mlflow_client import experiment_id, open_client
from schemas.latency import ProfilePoint
from schemas.profile import ProfileConfig, ProfileReport

EXPERIMENT = "refrain profiles"


def record_profile(report: ProfileReport, config: ProfileConfig, tracking_uri: str | None) -> None:
    """Log points, accuracy and pictures, which are drawn beside the profile."""
    profile, pictures = report.profile, draw_profile(report)
    client, artifacts = open_client(config.runs_dir, tracking_uri)
    experiment = experiment_id(client, EXPERIMENT, artifacts)
    run_id = client.create_run(experiment, run_name=report.profile_file.parent.name).info.run_id
    for name, value in config.model_dump(mode="json").items():
        client.log_param(run_id, name, value)
    client.log_param(run_id, "hardware", profile.hardware)
    for name, accuracies in (
        ("held_out", report.held_out),
        ("between_batches", report.between_batches),
    ):
        for accuracy in accuracies:
            client.log_metric(run_id, f"{name}/{accuracy.kind}", accuracy.median_error)
    columns = {
        field: [getattr(point, field) for point in profile.points]
        for field in ProfilePoint.model_fields
    }
    client.log_table(run_id, columns, "points.json")
    if rungs := ladder_rungs(profile):
        rows = [rung._asdict() for rung in rungs]
        columns = {field: [row[field] for row in rows] for field in Rung._fields}
        client.log_table(run_id, columns, "ladder.json")
    for file in (report.profile_file, *pictures):
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id, "FINISHED")
