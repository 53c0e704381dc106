"""Records on their way to a server that may be away: files until they are delivered.

    add ─► outbox/00000012/record.json (and a file) ─► a thread: deliver ─► deleted
                        │                                    │
              found again by a resumed run       away: wait, then once more
                        ▲                        refused: set aside
                        └───── outbox/refused ◄──┘

A record is delivered at least once, in the order in which it was added. The server refuses a record
when it says so, or when it takes none of `MAX_TRIES` although it answers otherwise. A refused
record holds up no other; it is a failure of the record (`engines.failures`), and is tried again
when the run is resumed. While the server is away nothing is refused.
"""

import errno
import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.durable import flush, flush_all, is_disk_full
from engines.failures import Failures

LIMIT_BYTES = 512 * 2**20
"""Bytes of files that may wait. Further files are left out; metrics and the like never are."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 10.0
"""Seconds between two tries while the server is away: twice as long each time, up to the second."""
MAX_TRIES = 5
"""Tries of one record at a server that answers. Of a kind of which the last one was set aside after
so many, the next gets a single one."""
LOOK_S = 1.0
"""Seconds between two looks for what other processes have added."""
_REFUSED, _LEFT_OUT = "refused", "left_out"


class ServerAway(Exception):
    """The server cannot be reached now; later the same record may be delivered."""


def _is_up() -> bool:
    """A server of which nothing more is known than its errors is taken for away."""
    return False


@dataclass(frozen=True, slots=True)
class Record:
    kind: str
    values: dict[str, Any]
    """JSON."""
    file: Path | None = None
    """File with what is too large for JSON, under the name that it is to be known by."""


class Outbox:
    """Owns a directory and the thread that empties it."""

    def __init__(
        self,
        directory: Path,
        deliver: Callable[[Record], None],
        server: str,
        failures: Failures,
        delivers: bool = True,
        is_up: Callable[[], bool] = _is_up,
    ) -> None:
        """Open the outbox; what an earlier process left in it is delivered first.

        Args:
            deliver: Called on the thread; raises `ServerAway`, or anything else for a record that
                the server refuses.
            server: Its name, for people.
            failures: Gets what is refused and what cannot be written, and warns when the server
                goes away and when it is back.
            delivers: One process of a run does; what others add is found by it.
            is_up: Called on the thread when a record was not delivered: whether the server answers
                at all.
        """
        self._directory = directory
        self._deliver, self._server, self._is_up = deliver, server, is_up
        self._failures = failures
        with failures.contained(f"opening the outbox for {server}"):
            directory.mkdir(parents=True, exist_ok=True)
            if delivers:
                _put_back(directory)
        self._waiting = deque(_numbered(directory))
        self._num_bytes = sum(_size(path) for path in self._waiting)
        known = [*self._waiting, *_numbered(directory / _REFUSED)]
        self._next = max((int(path.name) + 1 for path in known), default=0)
        self._changed = threading.Condition()
        self._closing = False
        self._is_away = False
        self._busy = False
        self._num_tries = 0
        """Tries of the oldest record at a server that answered."""
        self._failing: set[str] = set()
        """Kinds of records of which the last one was set aside after `MAX_TRIES`."""
        # The thread sees the settings of whoever opened the outbox.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name=f"outbox {server}", daemon=True
        )
        if delivers:
            self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, kind: str, values: Mapping[str, Any], file: tuple[str, bytes] | None = None):
        """Durable when this returns: the machine may lose its power, the server be away. One that
        cannot be written, on a full disk first of all, is a failure, and nothing was added.

        Args:
            file: Its name and content.
        """
        with self._changed, self._failures.contained(f"writing {kind} for {self._server}"):
            if file and self._num_bytes + len(file[1]) > LIMIT_BYTES:
                with (self._directory / _LEFT_OUT).open("a") as left_out:
                    left_out.write(f"{kind} {file[0]}\n")
                return
            path = self._write(kind, dict(values), file)
            self._num_bytes += _size(path)
            self._waiting.append(path)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is delivered; False when the time was too short."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Deliver what can be delivered in this time; the rest stays for the next to open it."""
        self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            # A call in progress may wait for an answer; its record is delivered again.
            self._changed.wait_for(lambda: not self._busy, timeout=1.0)

    def missing(self) -> list[str]:
        """Sentences for people about what the server does not have."""
        said = []
        if self._waiting:
            said.append(
                f"{self.num_waiting} records for {self._server} wait in {self._directory}: "
                "resume the run to deliver them"
            )
        refused = len(_numbered(self._directory / _REFUSED))
        if refused:
            said.append(
                f"{refused} records that {self._server} refused are in "
                f"{self._directory / _REFUSED}: resume the run to try them once more"
            )
        left_out = self._directory / _LEFT_OUT
        if left_out.exists():
            num = len(left_out.read_text().splitlines())
            said.append(
                f"{num} files for {self._server} were left out, as more than "
                f"{LIMIT_BYTES / 2**20:.0f} MiB waited; they are listed in {left_out}"
            )
        return said

    def _write(self, kind: str, values: dict[str, Any], file: tuple[str, bytes] | None) -> Path:
        unfinished = self._fresh(f".unfinished-{os.getpid()}")
        unfinished.mkdir()
        if file:
            (unfinished / file[0]).write_bytes(file[1])
        record = {"kind": kind, "values": values, "file": file[0] if file else None}
        (unfinished / "record.json").write_text(json.dumps(record))
        flush_all(unfinished)
        numbered = self._numbered_anew(unfinished)
        flush(self._directory)
        return numbered

    def _numbered_anew(self, unfinished: Path) -> Path:
        """A number that no other process has taken meanwhile."""
        while True:
            self._next += 1
            try:
                return unfinished.rename(self._directory / f"{self._next - 1:08d}")
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def _fresh(self, name: str) -> Path:
        """A place in the directory where nothing is; a crash may have left something."""
        path = self._directory / name
        if path.exists():
            shutil.rmtree(path)
        return path

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        while path := self._oldest():
            try:
                delivered = self._try(_read(path))
            except Exception as error:
                self._failures.add(f"delivering {_kind(path)} to {self._server}", error)
                self._drop(path, keep=True)
                continue
            if delivered:
                self._drop(path)
                pause_s = FIRST_PAUSE_S
            else:
                self._pause(pause_s)
                pause_s = min(2.0 * pause_s, MAX_PAUSE_S)

    def _try(self, record: Record) -> bool:
        """Whether the record was delivered. Raises the server's error for one that it refuses."""
        try:
            self._deliver(record)
        except ServerAway as error:
            if is_disk_full(error) or not self._is_up():
                self._note(error)
                return False
            self._num_tries += 1
            if self._num_tries >= (1 if record.kind in self._failing else MAX_TRIES):
                self._failing.add(record.kind)
                raise
            return False
        self._failing.discard(record.kind)
        self._note(None)
        return True

    def _oldest(self) -> Path | None:
        """None when the outbox is closed."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not self._waiting and not self._closing:
                self._changed.wait(LOOK_S)
                if not self._closing:  # Whoever opens it next has what is there.
                    with self._failures.contained(f"reading the outbox for {self._server}"):
                        self._find_foreign()
            if self._closing:
                return None
            self._busy = True
            return self._waiting[0]

    def _find_foreign(self) -> None:
        """Take in records of other processes: whatever is there while nothing of this one waits."""
        if not self._waiting:
            self._waiting.extend(_numbered(self._directory))
            self._num_bytes += sum(_size(path) for path in self._waiting)

    def _drop(self, path: Path, keep: bool = False) -> None:
        """Take the oldest record out. Where its files cannot be moved, they are there when the run
        is resumed: to deliver it twice does no harm."""
        with self._changed:
            self._num_tries = 0
            self._waiting.popleft()
            with self._failures.contained(f"clearing the outbox for {self._server}"):
                self._num_bytes -= _size(path)
                if keep:
                    apart = self._directory / _REFUSED
                    apart.mkdir(exist_ok=True)
                    path.rename(apart / path.name)
                else:
                    # Renamed first: half a record must not look like one.
                    shutil.rmtree(path.rename(self._fresh(".delivered")))
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing, seconds)

    def _note(self, away: ServerAway | None) -> None:
        """Tell when the server goes away, and when it is back."""
        if away and not self._is_away:
            self._failures.warn(
                f"{self._server} does not answer, the run goes on and its record waits in "
                f"{self._directory}: {away}"
            )
        elif self._is_away and not away:
            self._failures.warn(f"{self._server} is back and gets what has waited")
        self._is_away = away is not None


def _numbered(directory: Path) -> list[Path]:
    """Records, the oldest first."""
    return sorted(path for path in directory.glob("[0-9]*") if path.name.isdigit())


def _put_back(directory: Path) -> None:
    """Let what was refused earlier wait again, under its own number: it comes first."""
    for path in _numbered(directory / _REFUSED):
        path.rename(directory / path.name)


def _kind(path: Path) -> str:
    """A record's kind, whatever is wrong with it."""
    try:
        return _read(path).kind
    except (OSError, ValueError, TypeError, KeyError):
        return "a damaged record"


def _size(record: Path) -> int:
    return sum(file.stat().st_size for file in record.iterdir())


def _read(path: Path) -> Record:
    record = json.loads((path / "record.json").read_text())
    file = path / record["file"] if record["file"] else None
    return Record(record["kind"], record["values"], file)
