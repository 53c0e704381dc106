"""The directory of a run: who uses it, and which config it belongs to."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from engines.durable import write_durably
from engines.histospec.library import delete_indexes
from engines.paths import check_regular
from engines.private import require_own, tighten, use_private_umask
from engines.reading import read_json_object, readable_lines, validated
from engines.shared_memory import clear_dead
from schemas.config import TrainConfig
from schemas.profile import ProfileConfig
from schemas.resume import OnResume, SettingChange, changed_settings
from schemas.run import RunRef
from schemas.secret import fill_in, secrets_of
from tasks.run.config_record import CONFIG_FILE, read_values, refuse_redacted, write_config

Config = TrainConfig | ProfileConfig

DATED = ("data.date", "data.locale")
"""Settings that are filled in when a run begins (`tasks.run.dated`)."""
CHANGES_FILE = "changes.jsonl"
"""Settings that were changed when the run was resumed, a `SettingChange` a line."""
STORE_FILE = "refrain.duckdb"
SUMMARY_FILE = "summary.json"
REF_FILE = "live.json"
"""Address of the run while it is live: a `schemas.run.RunRef`."""
LOCK_FILE = ".lock"
LOCK_TIMEOUT_S = 0.5
"""Longer than somebody who looks whether the run is alive holds the lock."""
CLEARING_S = 60.0
"""Longest time to clear up after a driver that was killed."""
OUTBOX_DIR = "outbox"
"""Records that servers do not have yet; see `engines.tracking.outbox`."""
_PID_FILE = "pid"
_CLEARING = " clears up"
"""End of the file of a process that does not run the run."""
_KINDS: dict[type, tuple[str, set[str]]] = {
    TrainConfig: ("run", {"runs_dir", "num_epochs"}),
    ProfileConfig: ("profile", {"runs_dir", "tp_degrees"}),
}
"""Kinds of configs: their name, and settings that tell them from other files called config.json."""
RUN_MARK = "REFRAIN_RUN_DIR"
"""Environment variable of every process that a run's driver starts on this machine."""


def check_run_dir(config: Config, resume: bool) -> list[SettingChange]:
    """Settings with which the run goes on otherwise than before. Raises ValueError when the
    directory is of another run, there is nothing to resume, or a setting has been changed that a
    run keeps."""
    refuse_redacted(config)
    stored = config.run_dir / CONFIG_FILE
    if not resume:
        if stored.exists():
            raise ValueError(
                f"there is a run in {config.run_dir} already: go on with it by --resume "
                f"{config.run_dir}, delete it by --overwrite, or give this one another name=..."
            )
        _refuse_leftovers(config.run_dir)
        return []
    if not stored.exists():
        raise ValueError(f"nothing to resume in {config.run_dir}: it holds no {CONFIG_FILE}")
    recorded = fill_in(read_values(stored), secrets_of(config))
    before = validated(recorded, str(stored), type(config))
    # Nor where it is: that is what it was found by.
    changes = [c for c in changed_settings(before, config) if c.name not in ("runs_dir", "name")]
    # A run of an earlier version has none, and who resumes one by a config file need give none.
    changes = [c for c in changes if c.name not in DATED or None not in (c.before, c.after)]
    kept = [str(change) for change in changes if change.on_resume is OnResume.KEPT]
    if kept:
        raise ValueError(
            f"{config.run_dir} was begun with other settings of those that decide on tokens or "
            "the order of data: resume it with the former ones, delete it by --overwrite, or give "
            "this run another name=... Different:\n  " + "\n  ".join(kept)
        )
    return changes


def claim_run_dir(config: Config, resume: bool) -> FileLock:
    """Make the directory this process's own until it ends, however it ends. Raises ValueError when
    a live run uses it, and as `check_run_dir` does."""
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
    """Clear up after a driver that was killed, if there is one."""
    with cleared_up(run_dir):
        pass


@contextlib.contextmanager
def cleared_up(run_dir: Path) -> Generator[bool]:
    """Kill what a killed driver left running, free its shared memory, and keep others from the
    directory in the block. False when there is no run, or a live one."""
    if not (run_dir / LOCK_FILE).exists():
        # Its driver was killed before it claimed the directory.
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
    """Raises ValueError for anything but an earlier run of this kind, or nothing: what is a link,
    what holds other files, what a process uses. Changes nothing."""
    if run_dir.is_symlink():
        raise ValueError(
            f"{run_dir} is a link to {os.readlink(run_dir)}, and --overwrite deletes a run's own "
            "directory alone: remove the link, or give this run another name"
        )
    if not run_dir.exists():
        return
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is no directory: move it away, or give another name")
    if not (run_dir / CONFIG_FILE).exists():
        _refuse_leftovers(run_dir)
        return
    what, settings = _KINDS[kind]
    if not settings <= read_values(run_dir / CONFIG_FILE).keys():
        raise ValueError(
            f"{run_dir / CONFIG_FILE} is not the config of a {what}, and --overwrite deletes "
            "nothing else: move the directory away, or give another name"
        )
    refuse_live(run_dir)


def delete_run(run_dir: Path, kind: type[Config] = TrainConfig) -> None:
    """Delete an earlier run. Raises ValueError as `check_deletable` does."""
    check_deletable(run_dir, kind)
    if not run_dir.exists():
        return
    lock = _acquire(run_dir)
    stop_leftovers(run_dir)
    # Indexes may lie elsewhere. Of a profile, or of a config that another version wrote, there is
    # nothing to delete.
    with contextlib.suppress(ValueError):
        delete_indexes(read_config(run_dir).history_dir)
    doomed = _doomed(run_dir)
    run_dir.rename(doomed)
    shutil.rmtree(doomed)
    lock.release()


def hold_run_dir(run_dir: Path) -> FileLock:
    """Keep other processes from the directory, which may not be there yet. Raises ValueError when a
    live run uses it, RuntimeError when another user made it."""
    require_own(run_dir)
    use_private_umask()
    run_dir.mkdir(parents=True, exist_ok=True)
    return _acquire(run_dir)


def replace_run(run_dir: Path, by: Path) -> None:
    """Put a finished run in the place of an earlier one."""
    doomed = _doomed(run_dir)
    if run_dir.exists():
        run_dir.rename(doomed)
    by.rename(run_dir)
    shutil.rmtree(doomed, ignore_errors=True)


def _doomed(run_dir: Path) -> Path:
    """Name that a run is deleted under: nobody is to go on with one that is half there."""
    doomed = run_dir.with_name(f".deleted_{run_dir.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    return doomed


def mark_processes(run_dir: Path) -> None:
    """Let every process that is started from here on be known as this run's."""
    os.environ[RUN_MARK] = str(run_dir.absolute())


def stop_leftovers(run_dir: Path) -> None:
    """Kill what a driver that was itself killed left running. The run's lock must be held."""
    own = psutil.Process()
    spared = {own.pid, *(process.pid for process in own.children(recursive=True))}
    for process in processes_of(run_dir):
        if process.pid not in spared:
            with contextlib.suppress(psutil.Error):
                process.kill()


def processes_of(run_dir: Path) -> Iterator[psutil.Process]:
    """Processes of this machine that a driver of the run has started, and what those have."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_MARK) == str(run_dir.absolute()):
                yield process


def read_config(run_dir: Path) -> TrainConfig:
    """The config of the run in this directory, moved along when the directory was."""
    file = run_dir / CONFIG_FILE
    if not file.exists():
        raise ValueError(f"no run in {run_dir}: it holds no {CONFIG_FILE}")
    where = {"runs_dir": str(run_dir.parent), "name": run_dir.name}
    return validated(read_values(file) | where, str(file), TrainConfig)


def read_changes(run_dir: Path) -> list[SettingChange]:
    """Settings that were changed when the run was resumed, the oldest change first."""
    changes, wrong = readable_lines(run_dir / CHANGES_FILE, SettingChange)
    if wrong:
        raise ValueError(f"{wrong[0]}: bring the file back from a copy, or remove the line")
    return changes


def is_run(directory: Path) -> bool:
    """Whether a run or a profile has this directory: a model's has a config.json too."""
    file = directory / CONFIG_FILE
    try:
        return file.is_file() and "runs_dir" in read_json_object(file)
    except ValueError:
        return False


def is_live(run_dir: Path) -> bool:
    """Whether a process holds the run. Looking does not keep one from starting: the lock is taken
    for less time than a run waits for it."""
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
    """Raises ValueError when a live run uses the directory."""
    if is_live(run_dir) and not _is_clearing(run_dir):
        raise _used(run_dir)


@contextlib.contextmanager
def made_known(ref: RunRef) -> Generator[RunRef]:
    """Let other processes find the run while this lasts."""
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
            f"{run_dir} is not a run's directory: it holds {', '.join(sorted(found)[:5])}, but no "
            f"{CONFIG_FILE}; delete it yourself, or give this run another name=..."
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
    """Whether who has the lock clears up after a driver that was killed, which ends soon."""
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
