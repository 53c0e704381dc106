"""Prefect's pages of a run: one page per step, and the progress of a rollout stage.

Nothing here waits for Prefect's server. Pages go through an outbox in the run's directory. Of the
progress, only the latest value is sent.
"""

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import copy_context
from http import HTTPStatus
from pathlib import Path
from typing import Any

from refrain.engines.accounting.names import digest
from refrain.engines.failures import Failures
from refrain.engines.tracking.outbox import Outbox, Record, ServerAway
from refrain.tasks.run.run_dir import OUTBOX_DIR

FLUSH_S = 10.0
"""Seconds that the end of a run waits until Prefect's server has its pages."""
PROGRESS_EVERY_S = 3.0
"""Seconds between two updates of the progress."""


class StepPages:
    """Markdown artifacts of a run's steps, shown with their flow runs."""

    def __init__(
        self, run_dir: Path, name: str, failures: Failures, *, delivers: bool = True
    ) -> None:
        """`delivers`: True in the process that drives the run. Others leave their pages to it."""
        self._name = name
        directory = run_dir / OUTBOX_DIR / "prefect"
        self._outbox = Outbox(
            directory, _deliver, "Prefect", failures, delivers=delivers, is_up=_is_up
        )

    def add(self, kind: str, description: str, markdown: str) -> None:
        """Add a page to the current task. All steps of a run share one key: Prefect lists the
        newest page, and the others as its history."""
        values = {
            "type": "markdown",
            "key": artifact_key(self._name, kind),
            "description": description,
            **_running_ids(),
        }
        content = markdown.encode("utf-8", "backslashreplace")
        self._outbox.add("page", values, ("page.md", content))

    def flush(self) -> None:
        """Wait until Prefect has all pages, for at most `FLUSH_S` seconds."""
        self._outbox.flush(FLUSH_S)

    def missing(self) -> list[str]:
        return self._outbox.missing()

    def close(self) -> None:
        self._outbox.close(timeout_s=1.0)


class ProgressPage:
    """A progress artifact. A thread updates it inside the `with` block."""

    def __init__(self, name: str, description: str, failures: Failures) -> None:
        self._failures = failures
        self._values = {
            "type": "progress",
            "key": artifact_key(name, "rollout"),
            "description": description,
            **_running_ids(),
        }
        self._percent = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name="progress", daemon=True
        )

    def show(self, share: float) -> None:
        """Set the share that is done, from 0 to 1."""
        self._percent = round(100.0 * share, 1)

    def __enter__(self) -> "ProgressPage":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _work(self) -> None:
        with self._failures.contained("Prefect's page of progress"):
            shown, artifact = self._send(None)
            ended = False
            while not ended:
                ended = self._ended.wait(PROGRESS_EVERY_S)
                if shown != self._percent:
                    shown, artifact = self._send(artifact)

    def _send(self, artifact: Any) -> tuple[float, Any]:
        from prefect.client.schemas.actions import ArtifactUpdate

        percent = self._percent
        try:
            with _client() as client:
                if artifact is None:
                    artifact = _create(client, self._values | {"data": percent})
                else:
                    client.update_artifact(artifact, ArtifactUpdate(data=percent))
        except ServerAway:
            return -1.0, artifact
        return percent, artifact


def artifact_key(name: str, kind: str) -> str:
    """Return the key of a run's pages of one kind. Prefect allows lower case, digits and dashes.
    Other names get a digest, so that `my.run` and `my_run` get different keys."""
    allowed = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{allowed}-{kind}" if allowed == name else f"{allowed}-{digest(name)}-{kind}"


def _deliver(record: Record) -> None:
    assert record.file is not None
    with _client() as client:
        _create(client, record.values | {"data": record.file.read_text()})


def _is_up() -> bool:
    """Return whether Prefect's server answers."""
    try:
        with _client() as client:
            return client.api_healthcheck() is None
    except ServerAway:
        return False


def _create(client: Any, values: dict[str, Any]) -> Any:
    """Create an artifact and return its id."""
    from prefect.client.schemas.actions import ArtifactCreate

    return client.create_artifact(ArtifactCreate(**values)).id


@contextmanager
def _client() -> Generator[Any]:
    """Yield a client of Prefect's API. Raise `ServerAway` for errors that may pass."""
    import httpx
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            yield client
    except httpx.HTTPStatusError as error:
        if error.response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        raise ServerAway(str(error)) from error
    except (httpx.HTTPError, RuntimeError) as error:
        # RuntimeError: the embedded server does not start, or the API is missing.
        raise ServerAway(str(error)) from error


def _running_ids() -> dict[str, str | None]:
    from prefect.runtime import flow_run, task_run

    return {"flow_run_id": flow_run.id, "task_run_id": task_run.id}
