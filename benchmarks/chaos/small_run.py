"""A small real run in a session of its own: started, watched, found by its processes, resumed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import yaml

from benchmarks.chaos.faults import Moment, RunMode, Strike, Target
from benchmarks.chaos.reading import shared_by
from engines.tracking.progress_file import read_progress
from schemas.drafting import NGRAM
from schemas.latency import PointKind, Profile
from schemas.progress import RunProgress
from tasks.run.run_dir import RUN_MARK, processes_of

CHECKOUT = Path(__file__).resolve().parents[2]
DEMO = CHECKOUT / "infra" / "demo"
NAME, DRAFT_MODEL = "chaos", "small"
NUM_PROMPTS, PROMPTS_PER_STEP, GROUP_SIZE = 12, 6, 4
NUM_EPOCHS = 6
STALL_S = 40.0
"""Bound on a silent engine in these runs: low, but more than a step takes on a busy machine."""
POLL_S = 0.1
SHARED_S = 1.0
"""Seconds between two looks at what it has in shared memory."""
_ELSEWHERE = ("RAY_ADDRESS", "PREFECT_API_URL", "MLFLOW_TRACKING_URI")

SIGNS = {
    Target.ENGINE: "ray::VLLMEngine",
    Target.ENGINE_CORE: "VLLM::EngineCore",
    Target.TP_WORKER: "VLLM::Worker",
    Target.DRAFTER: "ray::VLLMDrafter",
    Target.TRAINER: "ray::TrainerActor",
    Target.STORE: "ray::StoreActor",
    Target.HISTORY: "ray::HistoryWorker",
    Target.SCORER: "ray::RewardActor",
    Target.RAYLET: "raylet/raylet",
    Target.GCS: "gcs/gcs_server",
    Target.PREFECT: "prefect.server.api.server",
}
"""Processes, by what their command lines hold."""

_LINES = {
    Moment.STARTING: "starting Ray",
    Moment.PUBLICATION: r"train step (\d+): rolling out",
    Moment.SCORING: r"train step (\d+): scoring",
    Moment.TRAINING: r"step (\d+): training",
    Moment.CHECKPOINTING: r"step (\d+): saving",
    Moment.VALIDATION: "validation step 0: rolling out",
    Moment.DEFERRAL: r"train step (\d+): scoring",
}
"""Beginnings of lines of a run's output, with the step."""
_FINISHED = {Moment.ROLLOUT: 0.0, Moment.MIGRATION: 0.4, Moment.SWITCH: 0.4}
"""Moments within a rollout stage: the share of its rollouts that have finished by then."""


class SmallRun:
    """A run of the demo's model, cut down to a few steps."""

    def __init__(self, directory: Path, mode: RunMode, strikes: Sequence[Strike] = ()) -> None:
        """`directory`: must not exist; `strikes`: what it must have to be struck so."""
        directory.mkdir(parents=True)
        self.directory = directory.absolute()
        self.config = _write_config(self.directory, mode, strikes)
        self.run_dir = self.directory / NAME
        self.output = self.directory / "output"
        self.clock = self.directory / "clock-is-back"
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos"))
        """Its /tmp; short, as sockets' names are."""
        self.environment: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.shared: set[str] = set()
        """Files in shared memory that its processes have had."""
        self._num_past = self._num_before = 0
        """Bytes of the output before the moments that are waited for, and before the last start."""

    def start(self, *, resume: bool = False) -> None:
        arguments = ["--resume", str(self.run_dir)] if resume else [str(self.config)]
        environment = {k: v for k, v in os.environ.items() if k not in (*_ELSEWHERE, RUN_MARK)}
        path = [str(CHECKOUT / "benchmarks" / "chaos" / "clock"), str(CHECKOUT)]
        environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            "REFRAIN_CHAOS_CLOCK": str(self.clock),
            "TMPDIR": str(self.temporary),
            # As on a machine that has had runs before.
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory.parent / "compiled"),
            "COLUMNS": "200",
            "PYTHONUNBUFFERED": "1",
        }
        self.look_from_here()
        self._num_before = self._num_past
        with self._writing() as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", "train", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=CHECKOUT,
                env=environment | self.environment,
                start_new_session=True,
                # A campaign under `nohup` ignores SIGHUP; its runs are to take it.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )

    @contextmanager
    def _writing(self) -> Generator[Any]:
        """A pipe to the output: a driver whose disk is full has its last words still."""
        with self.output.open("ab") as output:
            copying = subprocess.Popen(
                ["cat"], stdin=subprocess.PIPE, stdout=output, start_new_session=True
            )
        assert copying.stdin
        with copying.stdin:
            yield copying.stdin

    def look_from_here(self) -> None:
        """No moment has come yet."""
        self._num_past = self.output.stat().st_size if self.output.exists() else 0

    def wait_for(self, moment: Moment, step: int, timeout_s: float) -> bool:
        """Whether the moment came, in this step or a later one, before the run ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.running:
            if self._reached(moment, step):
                return True
            time.sleep(POLL_S)
        return False

    def wait(self, timeout_s: float) -> int | None:
        """Exit status of the driver; None when it goes on."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Processes of the run on this machine, but for the driver."""
        driver = self.process.pid if self.process else 0
        found = []
        for process in processes_of(self.run_dir):
            with suppress(psutil.Error):
                if process.pid != driver and process.status() != "zombie":
                    found.append(process)
        return found

    def find(self, target: Target) -> list[psutil.Process]:
        """Processes of this kind; several where there are several engines or ranks."""
        if target is Target.DRIVER:
            return [psutil.Process(self.process.pid)] if self.process and self.running else []
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                if SIGNS[target] in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def last_lines(self, num: int = 12) -> str:
        return "\n".join(self._said(0).splitlines()[-num:])

    def said(self) -> str:
        """Output since the last start."""
        return self._said(self._num_before)

    def end(self) -> None:
        """Kill whatever of it there is, and clear its /tmp."""
        for process in [*self.find(Target.DRIVER), *self.processes()]:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        if self.process:
            self.process.wait(30)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _reached(self, moment: Moment, step: int) -> bool:
        if line := _LINES.get(moment):
            # At the beginning of a line: "step 2: training" is no "train step 2: training".
            found = re.findall(f"^ *{line}", self._said(self._num_past), re.MULTILINE)
            return any(not number.isdigit() or int(number) >= step for number in found)
        progress: RunProgress | None = read_progress(self.run_dir)
        rolling = progress.rolling if progress else None
        if rolling is None or not rolling.label.startswith("train step"):
            return False
        return (
            int(rolling.label.split()[-1]) >= step
            and rolling.num_in_flight_tokens + rolling.num_finished_tokens > 0
            and rolling.num_finished >= _FINISHED[moment] * rolling.num_rollouts
        )

    def _said(self, past: int) -> str:
        output = self.output.read_bytes() if self.output.exists() else b""
        return output[past:].decode(errors="replace")


@contextmanager
def small_run(
    directory: Path, mode: RunMode, strikes: Sequence[Strike] = ()
) -> Generator[SmallRun]:
    """A run that has not been started yet; nothing of it is running when the block is left."""
    shutil.rmtree(directory, ignore_errors=True)
    run, over = SmallRun(directory, mode, strikes), threading.Event()
    looking = threading.Thread(target=_note_shared, args=(run, over), daemon=True)
    looking.start()
    try:
        yield run
    finally:
        over.set()
        looking.join()
        run.end()


def _note_shared(run: SmallRun, over: threading.Event) -> None:
    """Note what the run has in shared memory: others on this machine have files there too."""
    while not over.wait(SHARED_S):
        run.shared |= shared_by(process.pid for process in run.processes())


def _write_config(directory: Path, mode: RunMode, strikes: Sequence[Strike]) -> Path:
    values: dict[str, Any] = yaml.safe_load((DEMO / "train.yaml").read_text())
    for split, num_rows in (("train", NUM_PROMPTS), ("validation", 4)):
        file = directory / f"{split}.parquet"
        pq.write_table(pq.read_table(DEMO / "data" / f"{split}.parquet").slice(0, num_rows), file)
        values["data"][split] = [str(file)]
    values |= {"name": NAME, "runs_dir": str(directory), "mode": str(mode)}
    values |= {"num_epochs": NUM_EPOCHS, "prompts_per_step": PROMPTS_PER_STEP}
    values |= {"validation_samples": 1}
    values["model"]["path"] = str(DEMO / "model")
    values["data"]["max_response_tokens"] = 96
    values["rollout"] |= {"group_size": GROUP_SIZE, "stall_timeout_s": STALL_S}
    values["rollout"] |= {"start_timeout_s": 300.0}
    values["trainer"] |= {"timeout_s": 120.0}
    values["reward"] = {"type": "builtin", "timeout_s": 20.0}
    if mode is RunMode.PIPELINED:
        moving = {"min_growth": 1.0, "last_share": 0.9, "defer_share": 0.5, "oversample": 0.1}
        values["histopipe"] = moving
    for strike in strikes:
        _have_target(values, strike, directory)
    file = directory / "train.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def _have_target(values: dict[str, Any], strike: Strike, directory: Path) -> None:
    """Switch on what is struck."""
    if strike.moment is Moment.SWITCH:
        values |= {
            "pat": {"tp_degrees": [2]},
            "profile": str(profile_as_if_it_paid(directory / "profile.json")),
        }
    elif strike.target is Target.TP_WORKER:
        values["rollout"] |= {"tp_degree": 2, "num_engines": 1}
    if strike.target is Target.DRAFTER:
        model = {"name": DRAFT_MODEL, "path": str(DEMO / "drafter")}
        values["specactor"] = {"draft_models": [model], "drafter": DRAFT_MODEL, "ladder": False}


def profile_as_if_it_paid(file: Path) -> Path:
    """Write the demo's profile, with an engine of TP 2 ten times as fast, which on a CPU it is not,
    and a draft model that takes ten times as long as a lookup."""
    baseline = CHECKOUT / "benchmarks" / "baselines" / "profile_demo.json"
    profile = Profile.model_validate_json(baseline.read_bytes())
    at_tp_2 = [
        point.model_copy(update={"tp_degree": 2, "seconds": point.seconds / 10})
        for point in profile.points
        if point.kind is not PointKind.DRAFT
    ]
    by_model = [
        point.model_copy(update={"drafter": DRAFT_MODEL, "seconds": 10 * point.seconds})
        for point in profile.points
        if point.kind is PointKind.DRAFT and point.drafter == NGRAM
    ]
    points = (*profile.points, *at_tp_2, *by_model)
    file.write_text(profile.model_copy(update={"points": points}).model_dump_json())
    return file
