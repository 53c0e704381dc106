"""Log to trackio, whose files `trackio show` reads. They are in TRACKIO_DIR."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from engines.tracking.forward import TrackedRun


class TrackioWriter:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Mapping[str, float], step: int, at_s: float) -> None:
        moment = datetime.fromtimestamp(at_s, UTC).isoformat()
        self._run.log({**metrics, "logged_at": moment}, step=step)

    def close(self, *, failed: bool) -> None:
        del failed
        self._run.finish()


def open_writer(run: TrackedRun) -> TrackioWriter:
    import trackio

    opened = trackio.init(
        project=run.project,
        name=f"{run.name}-{run.id[:6]}",
        config=dict(run.settings),
        resume="allow",
        embed=False,
    )
    return TrackioWriter(opened)
