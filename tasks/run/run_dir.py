"""The directory of a run: its lock, its config, and how it is deleted or replaced."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from refrain.engines.durable import write_durably
from refrain.engines.histospec.library import delete_indexes
from refrain.engines.paths import check_regular
from refrain.engines.private import require_own, tighten, use_private_umask
from refrain.engines.shared_memory import clear_dead
from refrain.engines.user_files import read_json_object, readable_lines, validated
from refrain.schemas.config import TrainConfig
from refrain.schemas.profile import ProfileConfig
from refrain.schemas.removed_settings import removed_changes
from refrain.schemas.resume import OnResume, SettingChange, changed_settings
from refrain.schemas.run import RunRef
from refrain.schemas.secret import fill_in, secrets_of
from refrain.tasks.run.config_record import read_values, refuse_redacted, write_config
from refrain.tasks.run.find import CONFIG_FILE
from refrain.tasks.run.find import STORE_FILE as STORE_FILE

Config = TrainConfig | ProfileConfig

DATE = "data.date"
"""Setting that a run fills in at its start (`tasks.run.start_date`)."""
CHANGES_FILE = "changes.jsonl"
"""Settings that changed when the run was resumed, one `SettingChange` per line."""
SUMMARY_FILE = "summary.json"
REF_FILE = "live.json"
"""Address of the run while it is live: a `schemas.run.RunRef`."""
LOCK_FILE = ".lock"
LOCK_TIMEOUT_S = 0.5
"""Seconds to wait for the lock. A check whether the run is live holds it for less time."""
CLEARING_S = 60.0
"""Seconds to wait until another process has cleared up after a killed driver."""
OUTBOX_DIR = "outbox"
"""Directory of records that servers do not have yet (`engines.tracking.outbox`)."""
_PID_FILE = "pid"
_CLEARING = " clears up"
"""Suffix in the pid file while a process only clears up after a killed driver."""
_KINDS: dict[type, tuple[str, set[str]]] = {
    TrainConfig: ("run", {"runs_dir", "num_epochs"}),
    ProfileConfig: ("profile", {"runs_dir", "tp_degrees"}),
}
"""Kinds of configs: the name, and settings that distinguish it from any other config.json."""
RUN_MARK = "REFRAIN_RUN_DIR"
"""Environment variable that marks every process of a run on this machine."""


def check_run_dir(config: Config, resume: bool) -> list[SettingChange]:
    """Check that a run can start or resume here. Return the settings that changed.

    Raise ValueError when the directory belongs to another run, when there is nothing to resume, or
    when a setting changed that a run must keep.
    """
    refuse_redacted(config)
    stored = config.run_dir / CONFIG_FILE
    if not resume:
        if stored.exists():
            raise ValueError(
                f"there is a run in {config.run_dir} already: continue it with --resume "
                f"{config.run_dir}, delete it with --overwrite, or give this one another name=..."
            )
        _refuse_leftovers(config.run_dir)
        return []
    if not stored.exists():
        raise ValueError(f"nothing to resume in {config.run_dir}: it has no {CONFIG_FILE}")
    recorded = fill_in(read_values(stored), secrets_of(config))
    before = validated(recorded, str(stored), type(config))
    # Ignore the name and place of the run, because the user found it by them.
    changes = [c for c in changed_settings(before, config) if c.name not in ("runs_dir", "name")]
    changes += removed_changes(read_json_object(stored))
    # Runs of an earlier version have no date, and a config file given for a resume need not.
    changes = [c for c in changes if c.name != DATE or None not in (c.before, c.after)]
    kept = [str(change) for change in changes if change.on_resume is OnResume.KEPT]
    if kept:
        raise ValueError(
            f"{config.run_dir} was started with other settings that change tokens or the order of "
            "data: resume it with the former settings, delete it with --overwrite, or give this "
            "run another name=... Different:\n  " + "\n  ".join(kept)
        )
    return changes


def claim_run_dir(config: Config, resume: bool) -> FileLock:
    """Lock the directory for this process until it ends in any way. Raise ValueError when a live
    run uses it, and the errors of `check_run_dir`."""
    lock = hold_run_dir(config.run_dir)
    try:
        changes = check_run_dir(config, resume)
        tighten(config.run_dir)
        stop_leftovers(config.run_dir)
        mark_processes(config.run_dir)
        _record(config.run_dir, changes)
        write_config(config.run_dir, config)
        (config.run_dir / _PID_FILE).write_text(str(os.getpid()))
    except BaseException:
        lock.release()
        raise
    return lock


def clear_up(run_dir: Path) -> None:
    """Clear up after a killed driver, if there is one."""
    with cleared_up(run_dir):
        pass


@contextlib.contextmanager
def cleared_up(run_dir: Path) -> Generator[bool]:
    """Kill the processes of a killed driver and free its shared memory. Lock the directory during
    the block. Yield False when there is no run, or a live one."""
    if not (run_dir / LOCK_FILE).exists():
        # The driver was killed before it claimed the directory.
        stop_leftovers(run_dir)
        yield False
        return
    try:
        lock = _acquire(run_dir)
    except ValueError:
        yield False
        return
    try:
        (run_dir / _PID_FILE).write_text(f"{os.getpid()}{_CLEARING}")
        stop_leftovers(run_dir)
        clear_dead()
        (run_dir / REF_FILE).unlink(missing_ok=True)
        yield (run_dir / CONFIG_FILE).exists()
    finally:
        lock.release()


def check_deletable(run_dir: Path, kind: type[Config] = TrainConfig) -> None:
    """Raise ValueError unless there is an earlier run of this kind, or nothing. A link, a directory
    with other files and a live run are refused. Change nothing."""
    if run_dir.is_symlink():
        raise ValueError(
            f"{run_dir} is a link to {os.readlink(run_dir)}, and --overwrite deletes only real "
            "directories: remove the link, or give this run another name"
        )
    if not run_dir.exists():
        return
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a directory: move it away, or give another name")
    if not (run_dir / CONFIG_FILE).exists():
        _refuse_leftovers(run_dir)
        return
    what, settings = _KINDS[kind]
    if not settings <= read_values(run_dir / CONFIG_FILE).keys():
        raise ValueError(
            f"{run_dir / CONFIG_FILE} is not the config of a {what}, so --overwrite does not "
            "delete it: move the directory away, or give another name"
        )
    refuse_live(run_dir)


def delete_run(run_dir: Path, kind: type[Config] = TrainConfig) -> None:
    """Delete an earlier run. Raise the errors of `check_deletable`."""
    check_deletable(run_dir, kind)
    if not run_dir.exists():
        return
    lock = _acquire(run_dir)
    stop_leftovers(run_dir)
    # Indexes may be in another directory. A profile has none, and the config of another version of
    # refrain may be unreadable.
    with contextlib.suppress(ValueError):
        delete_indexes(read_config(run_dir).history_dir)
    doomed = _doomed(run_dir)
    run_dir.rename(doomed)
    shutil.rmtree(doomed)
    lock.release()


def hold_run_dir(run_dir: Path) -> FileLock:
    """Lock the directory, and make it if necessary. Raise ValueError when a live run uses it, and
    RuntimeError when another user made it."""
    require_own(run_dir)
    use_private_umask()
    run_dir.mkdir(parents=True, exist_ok=True)
    return _acquire(run_dir)


def replace_run(run_dir: Path, by: Path) -> None:
    """Replace an earlier run by a finished one."""
    doomed = _doomed(run_dir)
    if run_dir.exists():
        run_dir.rename(doomed)
    by.rename(run_dir)
    shutil.rmtree(doomed, ignore_errors=True)


def _doomed(run_dir: Path) -> Path:
    """Return the path to which a run is renamed before its deletion, so that nobody can resume a
    half-deleted run."""
    doomed = run_dir.with_name(f".deleted_{run_dir.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    return doomed


def mark_processes(run_dir: Path) -> None:
    """Mark all processes that this process starts from now on as the run's."""
    os.environ[RUN_MARK] = str(run_dir.absolute())


def stop_leftovers(run_dir: Path) -> None:
    """Kill processes that a killed driver left running. The caller must hold the run's lock."""
    own = psutil.Process()
    spared = {own.pid, *(process.pid for process in own.children(recursive=True))}
    for process in processes_of(run_dir):
        if process.pid not in spared:
            with contextlib.suppress(psutil.Error):
                process.kill()


def processes_of(run_dir: Path) -> Iterator[psutil.Process]:
    """Yield all processes on this machine that a driver of the run started, directly or not."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_MARK) == str(run_dir.absolute()):
                yield process


def read_config(run_dir: Path) -> TrainConfig:
    """Return the config of the run in this directory. Its name and `runs_dir` are those of the
    directory, which may have been moved."""
    file = run_dir / CONFIG_FILE
    if not file.exists():
        raise ValueError(f"no run in {run_dir}: it has no {CONFIG_FILE}")
    where = {"runs_dir": str(run_dir.parent), "name": run_dir.name}
    return validated(read_values(file) | where, str(file), TrainConfig)


def read_changes(run_dir: Path) -> list[SettingChange]:
    """Return the settings that changed when the run was resumed, the oldest change first. Raise
    ValueError for a damaged file."""
    changes, wrong = readable_lines(run_dir / CHANGES_FILE, SettingChange)
    if wrong:
        raise ValueError(f"{wrong[0]}: restore the file from a copy, or remove the line")
    return changes


def is_run(directory: Path) -> bool:
    """Return whether this is the directory of a run or a profile. A model has a config.json too, so
    look into the file."""
    file = directory / CONFIG_FILE
    try:
        return file.is_file() and "runs_dir" in read_json_object(file)
    except ValueError:
        return False


def is_live(run_dir: Path) -> bool:
    """Return whether a process holds the run. This takes the lock for less time than a starting run
    waits for it, so it disturbs no run."""
    if not (run_dir / LOCK_FILE).exists():
        return False
    check_regular(run_dir / LOCK_FILE)
    with (run_dir / LOCK_FILE).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def refuse_live(run_dir: Path) -> None:
    """Raise ValueError when a live run uses the directory."""
    if is_live(run_dir) and not _is_clearing(run_dir):
        raise _used(run_dir)


@contextlib.contextmanager
def made_known(ref: RunRef) -> Generator[RunRef]:
    """Write the run's reference to `live.json` during the block, so that other processes find
    it."""
    file = ref.run_dir / REF_FILE
    write_durably(file, ref.model_dump_json(indent=2))
    try:
        yield ref
    finally:
        file.unlink(missing_ok=True)


def _refuse_leftovers(run_dir: Path) -> None:
    found = {path.name for path in run_dir.iterdir()} if run_dir.exists() else set()
    if found := found - {LOCK_FILE, _PID_FILE}:
        raise ValueError(
            f"{run_dir} is not a run's directory: it has {', '.join(sorted(found)[:5])}, but no "
            f"{CONFIG_FILE}. Delete it yourself, or give this run another name=..."
        )


def _acquire(run_dir: Path) -> FileLock:
    lock = FileLock(run_dir / LOCK_FILE)
    try:
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except Timeout:
            if not _is_clearing(run_dir):
                raise
            lock.acquire(timeout=CLEARING_S)
    except Timeout as error:
        raise _used(run_dir) from error
    return lock


def _is_clearing(run_dir: Path) -> bool:
    """Return whether the lock's owner only clears up after a killed driver, which ends soon."""
    file = run_dir / _PID_FILE
    return file.exists() and file.read_text(errors="replace").endswith(_CLEARING)


def _used(run_dir: Path) -> ValueError:
    file = run_dir / _PID_FILE
    pid = file.read_text(errors="replace") if file.exists() else "unknown"
    return ValueError(
        f"{run_dir} is used by a live run (process {pid}): wait for it, stop it, or give this "
        "run another name=..."
    )


def _record(run_dir: Path, changes: list[SettingChange]) -> None:
    if not changes:
        return
    now_s = time.time()
    made = [change.model_copy(update={"at_s": now_s}) for change in changes]
    lines = [change.model_dump_json() + "\n" for change in [*read_changes(run_dir), *made]]
    write_durably(run_dir / CHANGES_FILE, "".join(lines))
