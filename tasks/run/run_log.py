"""A run's phases and steps in Prefect's log of its flows and tasks."""

import logging

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from engines.reports.progress import step_line
from schemas.progress import Rolling
from schemas.step import StepReport


class RunLog:
    """Implements `engines.reports.progress.Progress` on the page of the task or flow that tells;
    what nobody's task tells is on the run's own. Without a flow it is nowhere."""

    def __init__(self) -> None:
        self._own = _logger()

    def phase(self, text: str) -> None:
        self._tell(text)

    def warn(self, text: str) -> None:
        self._tell(text)

    def rolling(self, rolling: Rolling) -> None:
        """Say nothing: the task has a progress page."""

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
