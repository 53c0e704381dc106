"""Copies of a run's checkpoints in an object store, written with pyarrow's file systems.

```
s3://bucket/checkpoints/NAME/global_step_12/    the files of the run's own, state.json last
```

An object store cannot rename. So a copy is complete when its `state.json` exists, and valid when
its files have the sizes and checksums listed there.

`CheckpointCopies` copies in the background; a run waits for it only at its end. Every call to the
object store has a time limit. If a call does not return, its thread is abandoned.
"""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs

from refrain.engines.checksums import sha256_of
from refrain.engines.failures import Failures
from refrain.engines.learn.checkpoint import (
    STATE_FILE,
    CheckpointState,
    checkpoint_name,
    named_checkpoints,
    newest_verified,
    parse_state,
    read_state,
    write_checkpoint,
)
from refrain.schemas.secret import SecretUrl

T = TypeVar("T")

ANSWER_S = 60.0
"""Time limit of a small request to an object store."""
COPY_S, SLOWEST_BYTES_PER_S = 300.0, 2**20
"""Time limit of a copy: a fixed number of seconds, plus its bytes at this rate."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Pause between two tries of a copy. It doubles each time, up to the longest."""
LOOK_S = 2.0
"""Seconds between two checks for new checkpoints."""
MAX_LEFT = 3
"""Most copy threads that may hang. After that, this process tries no further copy."""


class CopyTimeout(RuntimeError):
    """The object store does not answer in time."""


class Mirror:
    """The copies of one run."""

    def __init__(self, url: str, run_name: str) -> None:
        """Raise ValueError for a URL that pyarrow has no file system for."""
        self.place = str(SecretUrl(url))
        """The URL without its secrets."""
        try:
            self._files, path = pyarrow.fs.FileSystem.from_uri(url)
        except (pa.ArrowInvalid, OSError) as error:
            said = SecretUrl(url).without_credentials(f"{url} cannot be used ({error})")
            # Do not chain the error: its text may contain a key.
            raise ValueError(
                f"trainer.checkpoint_url: {said}: give one such as s3://bucket/folder, "
                "gs://bucket/folder or file:///folder"
            ) from None
        self._root = PurePosixPath(path) / run_name

    def steps(self) -> list[int]:
        """Return the steps of complete copies, oldest first."""
        selector = pyarrow.fs.FileSelector(str(self._root), allow_not_found=True)
        found: list[pyarrow.fs.FileInfo] = self._files.get_file_info(selector)
        names = (re.fullmatch(r"global_step_(\d+)", info.base_name) for info in found)
        return sorted(step for match in names if match and self._is_whole(step := int(match[1])))

    def put(self, checkpoint: Path, keep: int) -> None:
        """Copy a checkpoint if its copy is missing, and remove all copies but the newest `keep`."""
        state = read_state(checkpoint)
        if not self._has(state):
            if self._is_whole(state.step):
                # The step was run again. Half of the old copy and half of the new one must not look
                # complete.
                self._files.delete_file(str(self._path(state.step) / STATE_FILE))
            for name in [*state.file_bytes, STATE_FILE]:
                self._copy_out(checkpoint / name, self._path(state.step) / name)
        for step in self.steps()[:-keep]:
            # Delete `state.json` first, so that a half-removed copy is incomplete.
            self._files.delete_file(str(self._path(step) / STATE_FILE))
            self._files.delete_dir(str(self._path(step)))

    def fetch(self, step: int, directory: Path) -> Path:
        """Download a copy into the run's checkpoints. Raise ValueError when the copy is damaged."""
        state = self._state(step)
        num_bytes = sum(state.file_bytes.values())
        return write_checkpoint(
            directory, state, lambda path: self._copy_in(state, path), num_bytes
        )

    def fetch_newer(self, directory: Path) -> Path | None:
        """Fetch the newest copy if the run's own checkpoints are older or missing."""
        (own, _), copies = newest_verified(directory), self.steps()
        own_step = read_state(own).step if own else -1
        return self.fetch(copies[-1], directory) if copies and copies[-1] > own_step else None

    def _path(self, step: int) -> PurePosixPath:
        return self._root / checkpoint_name(step)

    def _has(self, state: CheckpointState) -> bool:
        with suppress(ValueError):  # A damaged copy does not count.
            return self._is_whole(state.step) and self._state(state.step) == state
        return False

    def _state(self, step: int) -> CheckpointState:
        source = self._path(step) / STATE_FILE
        with self._files.open_input_stream(str(source)) as stream:
            state = parse_state(stream.read(), source)
        if state.step != step:
            raise ValueError(f"{source} belongs to step {state.step}: remove this copy")
        return state

    def _is_whole(self, step: int) -> bool:
        return self._files.get_file_info(str(self._path(step) / STATE_FILE)).is_file

    def _copy_out(self, file: Path, target: PurePosixPath) -> None:
        self._files.create_dir(str(target.parent))
        local = pyarrow.fs.LocalFileSystem()
        pyarrow.fs.copy_files(str(file), str(target), local, self._files)

    def _copy_in(self, state: CheckpointState, directory: Path) -> None:
        local = pyarrow.fs.LocalFileSystem()
        for name, num_bytes in state.file_bytes.items():
            source, target = self._path(state.step) / name, directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.fs.copy_files(str(source), str(target), self._files, local)
            if target.stat().st_size != num_bytes:
                raise ValueError(
                    f"the size of {source} is not the {num_bytes} bytes that were written; remove "
                    "this copy to use an earlier one"
                )
            if sha256_of(target) != state.file_sha256[name]:
                raise ValueError(
                    f"{source} is damaged: its SHA-256 is not the one that was written; remove "
                    "this copy to use an earlier one"
                )


class CheckpointCopies:
    """Copies a run's new checkpoints to its mirror on a background thread, the newest first. A copy
    that fails or hangs is recorded as a failure. The thread retries until the run ends, and again
    when the run resumes."""

    def __init__(self, mirror: Mirror, directory: Path, keep: int, failures: Failures) -> None:
        """`keep`: how many of the newest checkpoints to copy and keep."""
        self._mirror, self._directory, self._keep = mirror, directory, keep
        self._failures = failures
        self._done: set[tuple[Path, int]] = set()
        self._left: list[threading.Thread] = []
        """Threads of copies that hang."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Try once more to copy what is missing, then stop. Wait at most `timeout_s`; by default,
        as long as the missing bytes may take."""
        self._closing.set()
        if timeout_s is None:
            timeout_s = ANSWER_S + sum(_limit_s(checkpoint) for checkpoint, _ in self._waiting())
        self._thread.join(timeout_s)

    def missing(self) -> list[str]:
        """Return a message to the user if copies are missing."""
        names = ", ".join(checkpoint.name for checkpoint, _ in self._waiting())
        if not names:
            return []
        return [f"{names} not copied to {self._mirror.place}: resume the run to try once more"]

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            if self._copy_all():
                pause_s = FIRST_PAUSE_S
                self._closing.wait(LOOK_S)
            else:
                self._closing.wait(pause_s)
                pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)
        self._copy_all()

    def _copy_all(self) -> bool:
        """Copy what is missing. Return whether everything is copied now."""
        with self._failures.contained("copying a checkpoint"):
            for checkpoint in reversed(self._waiting()):
                self._copy(*checkpoint)
            return True
        return False

    def _waiting(self) -> list[tuple[Path, int]]:
        """Return the checkpoints without a copy, oldest first, each with the time when it was
        made."""
        made = []
        for checkpoint in named_checkpoints(self._directory):
            with suppress(FileNotFoundError):  # A later checkpoint has replaced it meanwhile.
                made.append((checkpoint, (checkpoint / STATE_FILE).stat().st_mtime_ns))
        return [one for one in made[-self._keep :] if one not in self._done]

    def _copy(self, checkpoint: Path, made_ns: int) -> None:
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= MAX_LEFT:
            raise CopyTimeout(f"{MAX_LEFT} copies to {self._mirror.place} have not returned")
        within(
            lambda: self._mirror.put(checkpoint, self._keep),
            _limit_s(checkpoint),
            f"copying {checkpoint.name} to {self._mirror.place}",
            self._left.append,
        )
        self._done.add((checkpoint, made_ns))


def within(
    call: Callable[[], T],
    timeout_s: float,
    what: str,
    left: Callable[[threading.Thread], object] = lambda _: None,
) -> T:
    """Run `call` on its own thread and return its result. Raise CopyTimeout after `timeout_s`, and
    pass the thread to `left`: a thread cannot be stopped."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=work, name=what, daemon=True)
    thread.start()
    try:
        return answer.result(timeout_s)
    except TimeoutError as error:
        if answer.done():
            raise
        left(thread)
        raise CopyTimeout(f"{what} has not ended in {timeout_s:.0f} s") from error


def _limit_s(checkpoint: Path) -> float:
    """Return the time limit for the copy of a checkpoint."""
    num_bytes = 0
    with suppress(FileNotFoundError, ValueError):  # The checkpoint may be removed at any time.
        num_bytes = sum(read_state(checkpoint).file_bytes.values())
    return COPY_S + num_bytes / SLOWEST_BYTES_PER_S
