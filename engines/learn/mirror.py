"""Copies of a run's checkpoints in an object store, by pyarrow's file systems.

```
s3://bucket/checkpoints/NAME/global_step_12/    the files of the run's own, state.json last
```

An object store renames nothing, so what makes a copy whole is that its `state.json` is there, and
what makes it right is that the files have the sizes and the checksums that it tells.

No run waits for a copy but at its end: `CheckpointCopies` makes them beside it. Every call to the
object store has a time limit; the thread of one that does not return is left to itself.
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

from engines.checksums import sha256_of
from engines.failures import Failures
from engines.learn.checkpoint import (
    STATE_FILE,
    CheckpointState,
    checkpoint_name,
    named_checkpoints,
    newest_verified,
    parse_state,
    read_state,
    write_checkpoint,
)
from schemas.secret import SecretUrl

T = TypeVar("T")

ANSWER_S = 60.0
"""Longest time for a small request to an object store."""
COPY_S, SLOWEST_BYTES_PER_S = 300.0, 2**20
"""Longest time for a copy: so many seconds, and those that its bytes take at this rate."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Seconds between two tries of a copy: twice as long each time, up to the second."""
LOOK_S = 2.0
"""Seconds between two looks for new checkpoints."""
MAX_LEFT = 3
"""Threads of copies that did not return, at most; then no further copy is tried in this process."""


class CopyHangs(RuntimeError):
    """An object store does not answer in time."""


class Mirror:
    """The copies of one run."""

    def __init__(self, url: str, run_name: str) -> None:
        """Raises ValueError for a URL that no file system of pyarrow's knows."""
        self.place = str(SecretUrl(url))
        """The URL without what is secret."""
        try:
            self._files, path = pyarrow.fs.FileSystem.from_uri(url)
        except (pa.ArrowInvalid, OSError) as error:
            said = SecretUrl(url).without_credentials(f"{url} cannot be used ({error})")
            # Without the error itself, which may show a key.
            raise ValueError(
                f"trainer.checkpoint_url: {said}: give one such as s3://bucket/folder, "
                "gs://bucket/folder or file:///folder"
            ) from None
        self._root = PurePosixPath(path) / run_name

    def steps(self) -> list[int]:
        """Steps of the copies that are whole, oldest first."""
        selector = pyarrow.fs.FileSelector(str(self._root), allow_not_found=True)
        found: list[pyarrow.fs.FileInfo] = self._files.get_file_info(selector)
        names = (re.fullmatch(r"global_step_(\d+)", info.base_name) for info in found)
        return sorted(step for match in names if match and self._is_whole(step := int(match[1])))

    def put(self, checkpoint: Path, keep: int) -> None:
        """Copy a checkpoint that is not there yet, and remove all copies but the newest `keep`."""
        state = read_state(checkpoint)
        if not self._has(state):
            if self._is_whole(state.step):
                # That of a step which was done again. Half of each must not look like one.
                self._files.delete_file(str(self._path(state.step) / STATE_FILE))
            for name in [*state.file_bytes, STATE_FILE]:
                self._copy_out(checkpoint / name, self._path(state.step) / name)
        for step in self.steps()[:-keep]:
            # First what makes it whole.
            self._files.delete_file(str(self._path(step) / STATE_FILE))
            self._files.delete_dir(str(self._path(step)))

    def fetch(self, step: int, directory: Path) -> Path:
        """Bring a copy back among the run's own. Raises ValueError for a damaged one."""
        state = self._state(step)
        num_bytes = sum(state.file_bytes.values())
        return write_checkpoint(
            directory, state, lambda path: self._copy_in(state, path), num_bytes
        )

    def fetch_newer(self, directory: Path) -> Path | None:
        """Fetch the newest copy, where the run's own checkpoints are older or gone."""
        (own, _), copies = newest_verified(directory), self.steps()
        own_step = read_state(own).step if own else -1
        return self.fetch(copies[-1], directory) if copies and copies[-1] > own_step else None

    def _path(self, step: int) -> PurePosixPath:
        return self._root / checkpoint_name(step)

    def _has(self, state: CheckpointState) -> bool:
        with suppress(ValueError):  # A damaged copy is none.
            return self._is_whole(state.step) and self._state(state.step) == state
        return False

    def _state(self, step: int) -> CheckpointState:
        source = self._path(step) / STATE_FILE
        with self._files.open_input_stream(str(source)) as stream:
            state = parse_state(stream.read(), source)
        if state.step != step:
            raise ValueError(f"{source} is of step {state.step}: remove this copy")
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
                    f"{source} has not the {num_bytes} bytes it was written with; remove this "
                    "copy, so that an earlier one is used"
                )
            if name in state.file_sha256 and sha256_of(target) != state.file_sha256[name]:
                raise ValueError(
                    f"{source} is damaged: its SHA-256 is not the one it was written with; remove "
                    "this copy, so that an earlier one is used"
                )


class CheckpointCopies:
    """Copies what appears among a run's checkpoints to its mirror, on a thread, the newest first.
    A copy that fails or hangs is a failure of the record; it is tried again until the run ends, and
    when the run is resumed."""

    def __init__(self, mirror: Mirror, directory: Path, keep: int, failures: Failures) -> None:
        """`keep`: so many of the newest checkpoints, and of their copies."""
        self._mirror, self._directory, self._keep = mirror, directory, keep
        self._failures = failures
        self._done: set[tuple[Path, int]] = set()
        self._left: list[threading.Thread] = []
        """Threads of copies that did not return."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Try once more what is not copied, and end. Longest wait: as long as that may take by its
        bytes, or `timeout_s`."""
        self._closing.set()
        if timeout_s is None:
            timeout_s = ANSWER_S + sum(_limit_s(checkpoint) for checkpoint, _ in self._waiting())
        self._thread.join(timeout_s)

    def missing(self) -> list[str]:
        """Sentences for people about copies that are not there."""
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
        """Whether everything is copied now."""
        with self._failures.contained("copying a checkpoint"):
            for checkpoint in reversed(self._waiting()):
                self._copy(*checkpoint)
            return True
        return False

    def _waiting(self) -> list[tuple[Path, int]]:
        """Checkpoints that are not copied, oldest first, each with when it was made."""
        made = []
        for checkpoint in named_checkpoints(self._directory):
            with suppress(FileNotFoundError):  # A later one has just taken its place.
                made.append((checkpoint, (checkpoint / STATE_FILE).stat().st_mtime_ns))
        return [one for one in made[-self._keep :] if one not in self._done]

    def _copy(self, checkpoint: Path, made_ns: int) -> None:
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= MAX_LEFT:
            raise CopyHangs(f"{MAX_LEFT} copies to {self._mirror.place} have not returned")
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
    """Result of a call on a thread of its own. Raises CopyHangs after `timeout_s`; the thread,
    which nothing can end, goes to `left`."""
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
        raise CopyHangs(f"{what} has not ended in {timeout_s:.0f} s") from error


def _limit_s(checkpoint: Path) -> float:
    """Longest time for the copy of a checkpoint."""
    num_bytes = 0
    with suppress(FileNotFoundError, ValueError):  # It may go at any time.
        num_bytes = sum(read_state(checkpoint).file_bytes.values())
    return COPY_S + num_bytes / SLOWEST_BYTES_PER_S
