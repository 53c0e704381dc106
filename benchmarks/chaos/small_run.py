"""A small real run in a session of its own: start it, watch it, find its processes, resume it."""

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

from refrain.benchmarks.chaos.faults import Moment, RunMode, Strike, Target
from refrain.benchmarks.chaos.run_traces import shared_by
from refrain.engines.tracking.progress_file import read_progress
from refrain.flows.own_server import APP
from refrain.schemas.drafting import NGRAM
from refrain.schemas.latency import PointKind, Profile
from refrain.schemas.progress import RunProgress
from refrain.tasks.run.run_dir import RUN_MARK, processes_of

CHECKOUT = Path(__file__).resolve().parents[2]
DEMO = CHECKOUT / "infra" / "demo"
NAME, DRAFT_MODEL = "chaos", "small"
NUM_PROMPTS, PROMPTS_PER_STEP, GROUP_SIZE = 12, 6, 4
NUM_EPOCHS = 6
STALL_S = 40.0
"""`rollout.stall_timeout_s` of these runs: low, but longer than a step takes on a busy machine."""
POLL_S = 0.1
SHARED_S = 1.0
"""Seconds between two looks at its files in shared memory."""
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
    Target.PREFECT: APP,
    Target.ENVIRONMENTS: "ray::EnvironmentActor",
    Target.ENVIRONMENT_WORKER: r"^\S+ -c .* environment \d+$",
    Target.ENVIRONMENT_GUARD: r"guard\.py \d+ .* environment \d+$",
}
"""Pattern of each process's command line."""
ANSWERED = "answered"
"""File with a line for each turn that the environment has answered: the seed of its task."""
WAITING = f"""
import asyncio, random
from pathlib import Path

class Waiting:
    def reset(self, task):
        self.seed = task.seed
        self.random = random.Random(task.seed)
        self.num_turns = 0

    async def step(self, turn):
        self.num_turns += 1
        await asyncio.sleep(self.random.uniform(0.1, 1.0))
        with Path(__file__).with_name("{ANSWERED}").open("a") as file:
            file.write(f"{{self.seed}}\\n")
        return "?" if self.num_turns < 3 else None
"""
"""Environment that asks again, twice, after a while."""

_LINES = {
    Moment.STARTING: "starting Ray",
    Moment.PUBLICATION: r"train step (\d+): rolling out",
    Moment.SCORING: r"train step (\d+): scoring",
    Moment.TRAINING: r"step (\d+): training",
    Moment.CHECKPOINTING: r"step (\d+): saving",
    Moment.VALIDATION: "validation step 0: rolling out",
    Moment.DEFERRAL: r"train step (\d+): scoring",
}
"""How the run's output announces a moment, with the step."""
_STALENESS = {RunMode.SYNC: 0, RunMode.PIPELINED: 1, RunMode.STALE: 2, RunMode.TURNS: 2}
_FINISHED = {Moment.ROLLOUT: 0.0, Moment.MIGRATION: 0.4, Moment.SWITCH: 0.4}
"""Moments within a rollout stage: share of its rollouts that have finished by then."""


class SmallRun:
    """A run of the demo's model with only a few steps."""

    def __init__(self, directory: Path, mode: RunMode, strikes: Sequence[Strike] = ()) -> None:
        """`directory`: must not exist. `strikes`: the config switches on their targets."""
        directory.mkdir(parents=True)
        self.directory = directory.absolute()
        self.config = _write_config(self.directory, mode, strikes)
        self.run_dir = self.directory / NAME
        self.output = self.directory / "output"
        self.clock = self.directory / "clock-is-back"
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos"))
        """Its /tmp. The path is short, as names of sockets must be."""
        self.environment: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.shared: set[str] = set()
        """Files in shared memory that its processes have had."""
        self._num_past = self._num_before = 0
        """Bytes of the output before the moments to wait for, and before the last start."""

    def start(self, *, resume: bool = False) -> None:
        arguments = ["--resume", str(self.run_dir)] if resume else [str(self.config)]
        environment = {k: v for k, v in os.environ.items() if k not in (*_ELSEWHERE, RUN_MARK)}
        path = [str(CHECKOUT / "benchmarks" / "chaos" / "clock"), str(CHECKOUT)]
        environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            "REFRAIN_CHAOS_CLOCK": str(self.clock),
            "TMPDIR": str(self.temporary),
            # Reuse compiled code, as on a machine that has had runs before.
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory.parent / "compiled"),
            "COLUMNS": "200",
            "PYTHONUNBUFFERED": "1",
        }
        self.look_from_here()
        self._num_before = self._num_past
        with self._writing() as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "refrain.flows.cli", "train", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=CHECKOUT,
                env=environment | self.environment,
                start_new_session=True,
                # A campaign under `nohup` ignores SIGHUP, but its runs must not.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )

    @contextmanager
    def _writing(self) -> Generator[Any]:
        """Yield a pipe to the output, so that a driver with a full disk can still write its last
        lines."""
        with self.output.open("ab") as output:
            copying = subprocess.Popen(
                ["cat"], stdin=subprocess.PIPE, stdout=output, start_new_session=True
            )
        assert copying.stdin
        with copying.stdin:
            yield copying.stdin

    def look_from_here(self) -> None:
        """Ignore all moments so far in `wait_for`."""
        self._num_past = self.output.stat().st_size if self.output.exists() else 0

    def wait_for(self, moment: Moment, step: int, timeout_s: float) -> bool:
        """Return whether the moment came, in this step or a later one, before the run ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.running:
            if self._reached(moment, step):
                return True
            time.sleep(POLL_S)
        return False

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status of the driver. None if it still runs."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Return the run's processes on this machine, without the driver."""
        driver = self.process.pid if self.process else 0
        found = []
        for process in processes_of(self.run_dir):
            with suppress(psutil.Error):
                if process.pid != driver and process.status() != "zombie":
                    found.append(process)
        return found

    def find(self, target: Target) -> list[psutil.Process]:
        """Return the processes of this kind: several if there are several engines or ranks."""
        if target is Target.DRIVER:
            return [psutil.Process(self.process.pid)] if self.process and self.running else []
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                if re.search(SIGNS[target], " ".join(process.cmdline()), re.DOTALL):
                    found.append(process)
        return found

    def last_lines(self, num: int = 12) -> str:
        return "\n".join(self._said(0).splitlines()[-num:])

    def said(self) -> str:
        """Return the output since the last start."""
        return self._said(self._num_before)

    def end(self) -> None:
        """Kill all its processes, and clear its /tmp."""
        for process in [*self.find(Target.DRIVER), *self.processes()]:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        if self.process:
            self.process.wait(30)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _reached(self, moment: Moment, step: int) -> bool:
        if line := _LINES.get(moment):
            # Match the beginning of a line: "step 2: training" is not "train step 2: training".
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
    """Yield a run that is not started yet. All its processes are gone when the block ends."""
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
    """Note which files in shared memory belong to the run, as others on this machine have files
    there too."""
    while not over.wait(SHARED_S):
        run.shared |= shared_by(process.pid for process in run.processes())


def _write_config(directory: Path, mode: RunMode, strikes: Sequence[Strike]) -> Path:
    values: dict[str, Any] = yaml.safe_load((DEMO / "train.yaml").read_text())
    for split, num_rows in (("train", NUM_PROMPTS), ("validation", 4)):
        file = directory / f"{split}.parquet"
        pq.write_table(pq.read_table(DEMO / "data" / f"{split}.parquet").slice(0, num_rows), file)
        values["data"][split] = [str(file)]
    values |= {
        "name": NAME,
        "runs_dir": str(directory),
        "staleness": _STALENESS[mode],
    }
    values |= {"num_epochs": NUM_EPOCHS, "prompts_per_step": PROMPTS_PER_STEP}
    values |= {"validation_samples": 1}
    values["model"]["path"] = str(DEMO / "model")
    values["data"]["max_response_tokens"] = 96
    values["rollout"] |= {"group_size": GROUP_SIZE, "stall_timeout_s": STALL_S}
    values["trainer"] |= {"timeout_s": 120.0}
    values["reward"] = {"type": "builtin", "timeout_s": 20.0}
    if mode is RunMode.PIPELINED:
        values["histopipe"] = {"min_growth": 1.0, "last_share": 0.9}
    if mode in (RunMode.STALE, RunMode.TURNS):
        values["rollout"]["placement"] = "queue"
    if mode is RunMode.TURNS:
        file = directory / "waiting.py"
        file.write_text(WAITING)
        values["environment"] = {"path": str(file), "processes": 2}
        values["data"]["max_response_tokens"] = 192
    if mode is not RunMode.SYNC:
        values["rollout"]["oversample"] = 0.1
    for strike in strikes:
        _have_target(values, strike, directory)
    file = directory / "train.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def _have_target(values: dict[str, Any], strike: Strike, directory: Path) -> None:
    """Switch on the target of a strike."""
    if strike.moment is Moment.SWITCH:
        values |= {
            "pat": {"tp_degrees": [2]},
            "profile": str(profile_as_if_it_paid(directory / "profile.json")),
        }
    elif strike.target is Target.TP_WORKER:
        values["rollout"] |= {"tp_degree": 2, "num_engines": 1}
    if strike.target is Target.DRAFTER:
        model = {"name": DRAFT_MODEL, "path": str(DEMO / "drafter")}
        values["specactor"] = {"draft_models": [model], "drafter": DRAFT_MODEL}


def profile_as_if_it_paid(file: Path) -> Path:
    """Write the demo's profile with two changes. An engine of TP 2 is ten times as fast, which no
    CPU shows. A draft model takes ten times as long as a lookup."""
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
