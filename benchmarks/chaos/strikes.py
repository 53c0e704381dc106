"""Carry out faults on a real run, and resume the run until it ends."""

import os
import random
import resource
import secrets
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from refrain.benchmarks.chaos.checks import RunTraces, complaints
from refrain.benchmarks.chaos.faults import Fault, Moment, RunMode, Strike, Target, first_step
from refrain.benchmarks.chaos.memory import run_out_of_memory
from refrain.benchmarks.chaos.run_traces import (
    LOCK_TIMEOUT_S,
    described,
    held_by_nobody,
    live_by_record,
    read_record,
    undelivered,
)
from refrain.benchmarks.chaos.small_run import (
    ANSWERED,
    GROUP_SIZE,
    NUM_EPOCHS,
    NUM_PROMPTS,
    PROMPTS_PER_STEP,
    STALL_S,
    SmallRun,
    small_run,
)
from refrain.benchmarks.chaos.turns import lost_turns, num_taken_over
from refrain.benchmarks.laps import Row
from refrain.benchmarks.overhead import free_port
from refrain.engines.learn.checkpoint import checkpoints_dir, latest_checkpoint
from refrain.engines.store.store import Store
from refrain.engines.tracking.progress_file import PROGRESS_FILE, STEPS_FILE
from refrain.flows.auth import MLFLOW_ASKED
from refrain.flows.ui import HOST, mlflow_command, service, wait_for
from refrain.tasks.run.run_dir import STORE_FILE, read_config

NUM_STEPS = NUM_EPOCHS * NUM_PROMPTS // PROMPTS_PER_STEP
MOMENT_TIMEOUT_S = 400.0
END_TIMEOUT_S = 480.0
"""Longest time from a fault to the end of the driver, and from a resume to its end."""
STOPPED_S = STALL_S + 20.0
MAX_RESUMES = 3
NOTHING = "nothing"
"""Value of `struck` if the moment did not come or there was no target."""
HANGUP_S = 60.0
"""Longest time for a run to end after its terminal was closed."""
GONE_S = 30.0
"""Longest time for the last processes to end after the driver."""
FILE_BYTES = 64 * 2**10
"""Limit of file sizes on a full disk."""


def undisturbed(mode: RunMode, directory: Path) -> RunTraces:
    """Return the record of a run without faults. Raise RuntimeError if it fails."""
    with small_run(directory, mode) as run:
        run.start()
        if run.wait(END_TIMEOUT_S) != 0:
            raise RuntimeError(f"the undisturbed run failed: {run.last_lines()}")
        record = read_record(run.run_dir, NUM_STEPS)
    if found := complaints(record, record):
        raise RuntimeError(f"the undisturbed run is not as it should be: {'; '.join(found)}")
    return record


def carry_out(strikes: Sequence[Strike], reference: RunTraces, directory: Path) -> list[Row]:
    """Return the rows of one run's faults in order: what was struck, how the driver ended before
    the next fault, and `complaints`. Complaints at the end of the run go to every fault."""
    mode = strikes[0].mode
    with small_run(directory, mode, strikes) as run, ExitStack() as stack:
        is_served = any(strike.target is Target.MLFLOW for strike in strikes)
        mlflow = MlflowServer(run, stack) if is_served else None
        if mlflow:
            mlflow.start()
            mlflow.wait()
        run.start()
        rows, step = [], 0
        for strike, after in zip(strikes, [*strikes[1:], None], strict=True):
            began_s, step = time.monotonic(), max(step + 1, first_step(strike))
            struck, found = _strike(run, strike, step, mlflow)
            # After other faults, the environment has answered some turns twice: in replays.
            lost = _lost_turns(run, strike) if not rows else {}
            found += [complaint] if (complaint := lost.pop("complaint", "")) else []
            then = (after.moment, max(step + 1, first_step(after))) if after else None
            ends, said = see_through(run, then)
            seconds = round(time.monotonic() - began_s, 1)
            row = {"run": strikes[0].number, "struck": struck, "ends": ends, "seconds": seconds}
            row |= lost | {"complaints": [*found, *said]}
            rows.append(strike.model_dump(mode="json") | row)
        # A driver whose files cannot grow cannot write to MLflow's database either.
        is_full = any(
            (one.target, one.fault) == (Target.DRIVER, Fault.DISK_FULL) for one in strikes
        )
        away = mlflow is not None or is_full
        if rows[-1]["ends"][-1:] == [0] and away and undelivered(run.run_dir):
            if mlflow:
                mlflow.wait()
            run.start(resume=True)
            rows[-1]["ends"].append(run.wait(END_TIMEOUT_S))
        found = _complaints_of_end(run, reference)
        if "turns_lost" in rows[0]:
            with _store(run) as store:
                rows[0]["turns_taken_over"] = num_taken_over(store, NUM_STEPS)
        last = run.last_lines() if found or any(row["complaints"] for row in rows) else ""
    return [row | {"complaints": [*row["complaints"], *found], "last_lines": last} for row in rows]


def _lost_turns(run: SmallRun, strike: Strike) -> dict[str, Any]:
    """Return how many turns a killed driver loses, and a complaint if those are too many."""
    if (strike.mode, strike.target) != (RunMode.TURNS, Target.DRIVER):
        return {}
    _left_running(run)
    answered, seed = run.directory / ANSWERED, read_config(run.run_dir).seed
    with _store(run) as store:
        number, complaint = lost_turns(
            store, answered.read_text().split(), seed, NUM_STEPS, GROUP_SIZE
        )
    return {"turns_lost": number, "complaint": complaint}


def _store(run: SmallRun) -> Store:
    return Store(run.run_dir / STORE_FILE, read_only=True, lock_timeout_s=LOCK_TIMEOUT_S)


def _complaints_of_end(run: SmallRun, reference: RunTraces) -> list[str]:
    processes = _left_running(run)
    # A killed run leaves its kernels and Ray's logs here; that is no fault.
    own = run.temporary / f"refrain-{os.getuid()}"
    files = [described(path) for path in run.temporary.iterdir() if path != own]
    files += held_by_nobody(run.shared)
    if run.wait(0) != 0:
        return []  # `see_through` has reported it.
    left = {"processes": tuple(processes), "files": tuple(sorted(files))}
    record = read_record(run.run_dir, NUM_STEPS)
    return complaints(record.model_copy(update=left), reference)


class MlflowServer:
    """MLflow's server beside a run, which gets its address. The bench restarts the server, as its
    operator would."""

    def __init__(self, run: SmallRun, stack: ExitStack) -> None:
        self._run, self._stack, self._port = run, stack, free_port()
        self._starts = 0
        self._password = secrets.token_urlsafe(32)
        run.environment |= {
            "MLFLOW_TRACKING_URI": f"http://{HOST}:{self._port}",
            "MLFLOW_TRACKING_USERNAME": "chaos",
            "MLFLOW_TRACKING_PASSWORD": self._password,
        }

    def start(self) -> None:
        self._starts += 1
        command = mlflow_command(self._run.directory, self._port)
        log = self._run.directory / f"mlflow-{self._starts}.log"
        # No job runs here, and MLflow would leave files of its job queue in shared memory.
        env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        env[MLFLOW_ASKED] = f"chaos:{self._password}"
        self._server = self._stack.enter_context(service("MLflow's server", command, log, env=env))
        self._process = psutil.Process(self._server.process.pid)

    def wait(self) -> None:
        """Return when the server answers."""
        wait_for(f"http://{HOST}:{self._port}/health", [self._server])

    def processes(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


def _strike(
    run: SmallRun, strike: Strike, step: int, mlflow: MlflowServer | None
) -> tuple[str, list[str]]:
    """Return the processes that were struck, and complaints if that was impossible."""
    if not run.wait_for(strike.moment, step, MOMENT_TIMEOUT_S):
        return NOTHING, [f"{strike.moment} never came"]
    server = mlflow if strike.target is Target.MLFLOW else None
    targets = server.processes() if server else _find(run, strike)
    if not targets:
        return NOTHING, [f"there was no {strike.target} while {strike.moment}"]
    struck = ", ".join(f"{target.pid} {target.name()}" for target in targets)
    how = _apply(run, strike, targets)
    if server and strike.fault is Fault.KILL:
        server.start()
    run.look_from_here()
    found = _left_by_hangup(run) if strike.fault is Fault.HANGUP else []
    return f"{struck} {how}".rstrip(), found


def _left_by_hangup(run: SmallRun) -> list[str]:
    """Return complaints about a run whose terminal was closed: it must end, and no record may list
    it as live."""
    if run.wait(HANGUP_S) is None:
        return [f"goes on {HANGUP_S:.0f} s after its terminal was closed"]
    left = [*_left_running(run), *held_by_nobody(run.shared), *live_by_record(run.run_dir)]
    return [f"left by a closed terminal: {one}" for one in left]


def _find(run: SmallRun, strike: Strike) -> list[psutil.Process]:
    """Return one target process. Faults of the whole run hit the driver. A process that is starting
    gets more time to appear."""
    drivers_own = (Fault.DAMAGED, Fault.CLOCK, Fault.LINE)
    target = Target.DRIVER if strike.fault in drivers_own else strike.target
    deadline = time.monotonic() + (GONE_S if strike.moment is Moment.STARTING else 1.0)
    while not (found := run.find(target)) and time.monotonic() < deadline and run.running:
        time.sleep(0.2)
    found.sort(key=lambda process: process.pid)
    return [random.Random(strike.number).choice(found)] if found else []


def _apply(run: SmallRun, strike: Strike, targets: Sequence[psutil.Process]) -> str:
    """Carry out the fault; return how, if there are several ways."""
    match strike.fault:
        case Fault.KILL:
            _signal(targets, signal.SIGKILL)
        case Fault.STOP:
            _signal(targets, signal.SIGSTOP)
            deadline = time.monotonic() + STOPPED_S
            while time.monotonic() < deadline and (run.running or strike.target is Target.DRIVER):
                time.sleep(0.5)
            _signal(targets, signal.SIGCONT)
        case Fault.DISK_FULL:
            for process in targets:
                limits = (FILE_BYTES, resource.RLIM_INFINITY)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
        case Fault.DAMAGED:
            _signal(targets, signal.SIGKILL)
            run.wait(GONE_S)
            for file in damageable(run.run_dir, strike.target):
                damage(file, strike.number)
        case Fault.CLOCK:
            run.clock.touch()
        case Fault.HANGUP:
            for process in targets:
                os.killpg(os.getpgid(process.pid), signal.SIGHUP)
        case Fault.LINE:
            _signal(targets, signal.SIGKILL)
            run.wait(GONE_S)
            damage_line(run.run_dir / STEPS_FILE, strike.number)
        case Fault.MEMORY:
            return "; ".join(map(run_out_of_memory, targets))
    return ""


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def damageable(run_dir: Path, target: Target) -> list[Path]:
    """Return files that a run can continue without, or with an older version."""
    match target:
        case Target.TRAINER:
            checkpoint = latest_checkpoint(checkpoints_dir(read_config(run_dir)))
            files = [file for file in checkpoint.rglob("*") if file.is_file()] if checkpoint else []
            return sorted(files, key=lambda file: file.stat().st_size)[-1:]
        case Target.HISTORY:
            return sorted((run_dir / "history").glob("*.index"))[:3]
        case _:
            return [run_dir / PROGRESS_FILE, run_dir / STEPS_FILE]


def damage(file: Path, seed: int) -> None:
    """Truncate the file and overwrite a part of the rest."""
    if not file.exists():
        return
    rng, content = random.Random(seed), bytearray(file.read_bytes())
    content = content[: max(1, len(content) * 3 // 4)]
    at = rng.randrange(len(content))
    content[at : at + 64] = rng.randbytes(min(64, len(content) - at))
    file.write_bytes(content)


def damage_line(file: Path, seed: int) -> None:
    """Overwrite a part of one line; leave the others unchanged."""
    rng, lines = random.Random(seed), file.read_bytes().splitlines(keepends=True)
    number = rng.randrange(len(lines))
    at = rng.randrange(len(lines[number]) // 2)
    lines[number] = lines[number][:at] + bytes(8) + lines[number][at + 8 :]
    file.write_bytes(b"".join(lines))


def see_through(
    run: SmallRun, until: tuple[Moment, int] | None
) -> tuple[list[int | None], list[str]]:
    """Resume the run whenever its driver has ended, until a moment of a step comes or the run
    finishes. Return the exit statuses of the driver, and complaints."""
    ends: list[int | None] = []
    found = []
    for turn in range(MAX_RESUMES + 1):
        if turn:
            run.start(resume=True)
        if until and run.wait_for(*until, END_TIMEOUT_S):
            return ends, found
        end = run.wait(0.0 if until else END_TIMEOUT_S)
        if end is None:
            found.append(f"no end within {END_TIMEOUT_S:.0f} s")
            _signal([*run.find(Target.DRIVER)], signal.SIGKILL)
            run.wait(GONE_S)
        elif end > 0 and "--resume" not in run.said():
            found.append("ended without advice")
        ends.append(end)
        if end == 0:
            return ends, found
    return ends, [*found, f"not finished after {MAX_RESUMES} resumes"]


def _left_running(run: SmallRun) -> list[str]:
    deadline = time.monotonic() + GONE_S
    while (left := run.processes()) and time.monotonic() < deadline:
        time.sleep(0.5)
    names = []
    for process in left:
        with suppress(psutil.Error):
            names.append(f"{process.pid} {' '.join(process.cmdline())[:60]}")
    return names
