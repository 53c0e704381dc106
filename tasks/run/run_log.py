"""Write a run's phases and steps to Prefect's logs."""

import logging

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from refrain.engines.reports.progress import step_line
from refrain.schemas.progress import Rolling
from refrain.schemas.step import StepReport


class RunLog:
    """An `engines.reports.progress.Progress` that logs to the current task or flow.

    Outside of both, it logs to the flow that made it. Without any flow, it logs nothing.
    """

    def __init__(self) -> None:
        self._own = _logger()

    def phase(self, text: str) -> None:
        self._tell(text)

    def warn(self, text: str) -> None:
        self._tell(text)

    def rolling(self, rolling: Rolling) -> None:
        """Log nothing, because the task has a progress page."""

    def step(self, report: StepReport, num_steps: int) -> None:
        self._tell(step_line(report, num_steps))

    def _tell(self, text: str) -> None:
        if logger := _logger() or self._own:
            logger.info(text)


def _logger() -> "logging.Logger | logging.LoggerAdapter[logging.Logger] | None":
    try:
        return get_run_logger()
    except MissingContextError:
        return None
