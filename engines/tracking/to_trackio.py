"""Log to trackio, whose dashboard is `trackio show`. Its files are in TRACKIO_DIR."""

from collections.abc import Mapping

import trackio

from refrain.engines.tracking.forward import TrackedRun


class TrackioWriter:
    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id[:6]}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
        )

    def log(self, metrics: Mapping[str, float], step: int, at_s: float) -> None:
        del at_s  # trackio takes the time itself.
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        del failed
        self._run.finish()


open_writer = TrackioWriter
