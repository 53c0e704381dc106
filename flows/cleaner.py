"""A process that runs beside a run, and clears up when the run cannot do it itself.

    run ── pipe ──► cleaner        SIGKILL, a crash, the second Ctrl-C: the kernel closes the pipe
            "done"                 the run has ended its processes, and the cleaner does nothing

When the pipe closes, the cleaner reports to Prefect and MLflow that the run has ended. It kills the
run's processes, frees shared memory and deletes `live.json`. Before that it imports no module of
refrain but this one.
"""

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TELL_S = 10.0
"""Seconds that it tries to report to Prefect's server, which may be dead too."""
_DONE = "done"
_ROOT = Path(__file__).resolve().parents[1]
# Append to the path: packages in the project's directory must not hide installed ones.
_CODE = "import sys; sys.path.append(sys.argv[1]); from refrain.flows.cleaner import main; main()"


class Cleaner:
    """The run's end of the pipe."""

    def __init__(self, run_dirs: Sequence[Path], mlflow_dir: Path) -> None:
        """`mlflow_dir`: the directory with MLflow's files."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            # Signals to the run's terminal and process group must not reach the cleaner.
            start_new_session=True,
        )
        # This runs when Python exits, after Prefect's server has been stopped.
        atexit.register(self._done)
        run_dirs = [run_dir.absolute() for run_dir in run_dirs]
        self.tell(run_dirs=[*map(str, run_dirs)], mlflow_dir=str(mlflow_dir.absolute()))

    def tell(self, **known: Any) -> None:
        """Send what else the cleaner has to end, for example the id `flow_run` at server `api`."""
        self._write(json.dumps(known))

    def _done(self) -> None:
        self._write(_DONE)
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        # If someone has killed the cleaner, the run goes on without it.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def main() -> None:
    known: dict[str, Any] = {}
    for line in sys.stdin:
        if line.strip() == _DONE:
            return
        known |= json.loads(line)
    if "flow_run" in known:
        telling = threading.Thread(target=_crash, args=(known["api"], known["flow_run"]))
        telling.daemon = True
        telling.start()
        telling.join(TELL_S)
    from refrain.tasks.run.end_killed import end_killed

    for run_dir in known["run_dirs"]:
        end_killed(Path(run_dir), Path(known["mlflow_dir"]))


def _crash(api: str, flow_run: str) -> None:
    """Report to Prefect's server that a flow and its live subflows have crashed."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import Crashed

    from refrain.flows.deployments import client_of

    crashed = Crashed(message="The run's process was killed; continue with --resume.")
    live = {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}
    parts = FlowRunFilter.model_validate(
        {"parent_flow_run_id": {"any_": [flow_run]}, "state": live}
    )
    itself = FlowRunFilter.model_validate({"id": {"any_": [flow_run]}, "state": live})
    with client_of(api) as client:
        for group in (itself, parts):
            for run in client.read_flow_runs(flow_run_filter=group):
                client.set_flow_run_state(run.id, crashed, force=True)
