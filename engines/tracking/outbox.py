"""Keep records in files until the server has them, even if the server is away.

    add ─► outbox/00000012/record.json (and a file) ─► a thread: deliver ─► delete
                        │                                    │
              a resumed run finds it             server away: wait, then try again
                        ▲                        refused: set aside
                        └───── outbox/refused ◄──┘

Each record is delivered at least once, in the order in which it was added.

A record counts as refused when the server rejects it. It also counts as refused after `MAX_TRIES`
failed tries, if the server answers other requests. While the server is away, no record is refused.
A refused record does not block others. The outbox counts a failure (`engines.failures`) and tries
the record again when the run is resumed.
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

from refrain.engines.durable import flush, flush_all, is_disk_full
from refrain.engines.failures import Failures

LIMIT_BYTES = 512 * 2**20
"""Most bytes of waiting records. Above it, new files are dropped. Records without a file, for
example metrics, are always kept."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 10.0
"""First and longest pause between two tries while the server is away. Each pause is twice as long
as the one before."""
MAX_TRIES = 5
"""Tries of one record at a server that answers. When a record has failed them all, the next record
of its kind gets a single try."""
LOOK_S = 1.0
"""Seconds between two checks for records of other processes."""
_REFUSED, _LEFT_OUT = "refused", "left_out"


class ServerAway(Exception):
    """The server cannot be reached now. A later try of the same record may succeed."""


@dataclass(frozen=True, slots=True)
class Record:
    kind: str
    values: dict[str, Any]
    """Values that JSON can represent."""
    file: Path | None = None
    """File with content that is too large for JSON. The server gets it under the same file name."""


class Outbox:
    """A directory of records and the thread that delivers them."""

    def __init__(
        self,
        directory: Path,
        deliver: Callable[[Record], None],
        server: str,
        failures: Failures,
        is_up: Callable[[], bool],
        delivers: bool = True,
    ) -> None:
        """Open the outbox. Records that an earlier process left are delivered first.

        Args:
            deliver: Delivers a record, on the thread. Raises `ServerAway` when the server cannot be
                reached, and another error when the server refuses the record.
            server: The server's name in messages.
            failures: Counts refused records and records that cannot be written. Warns when the
                server goes away and when it is back.
            is_up: Returns whether the server answers at all. Called on the thread after
                `ServerAway`.
            delivers: Whether this process delivers. Only one process of a run does; it finds the
                records of the others in the directory.
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
        """Failed tries of the oldest record at a server that answers."""
        self._failing: set[str] = set()
        """Kinds of records whose last one failed all its tries."""
        # Copy the context, so that the thread sees the caller's context variables.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name=f"outbox {server}", daemon=True
        )
        if delivers:
            self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, kind: str, values: Mapping[str, Any], file: tuple[str, bytes] | None = None):
        """Add a record. When this returns, the record is on disk and survives a power failure.

        A record that cannot be written, for example on a full disk, counts as a failure and is not
        added.

        Args:
            file: Name and content of the record's file.
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
        """Wait until all records are delivered. Return False when the time was too short."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Deliver records for at most this time. The next process delivers the rest."""
        self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            # If the call in progress takes longer, its record will be delivered again.
            self._changed.wait_for(lambda: not self._busy, timeout=1.0)

    def missing(self) -> list[str]:
        """Return sentences for the user about records that the server does not have."""
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
                f"{num} files for {self._server} were left out, because more than "
                f"{LIMIT_BYTES / 2**20:.0f} MiB waited: see the list in {left_out}"
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
        """Rename the directory to the next number that no other process has taken."""
        while True:
            self._next += 1
            try:
                return unfinished.rename(self._directory / f"{self._next - 1:08d}")
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def _fresh(self, name: str) -> Path:
        """Return a free path of this name; delete what a crash left there."""
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
        """Return whether the record was delivered. Raise the server's error if it was refused."""
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
        """Wait for a record and return the oldest; return None when the outbox is closed."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not self._waiting and not self._closing:
                self._changed.wait(LOOK_S)
                if not self._closing:  # The next process delivers records that come now.
                    with self._failures.contained(f"reading the outbox for {self._server}"):
                        self._find_foreign()
            if self._closing:
                return None
            self._busy = True
            return self._waiting[0]

    def _find_foreign(self) -> None:
        """Queue records of other processes, when no record of this process waits.

        In this case every record in the directory is from another process.
        """
        if not self._waiting:
            self._waiting.extend(_numbered(self._directory))
            self._num_bytes += sum(_size(path) for path in self._waiting)

    def _drop(self, path: Path, keep: bool = False) -> None:
        """Remove the oldest record from the queue, and delete it or move it to the refused ones.

        If its files cannot be moved, a resumed run delivers the record again, which does no harm.
        """
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
                    # Rename it first, so that nobody takes a half-deleted record for a whole one.
                    shutil.rmtree(path.rename(self._fresh(".delivered")))
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing, seconds)

    def _note(self, away: ServerAway | None) -> None:
        """Warn when the server goes away and when it is back."""
        if away and not self._is_away:
            self._failures.warn(
                f"{self._server} does not answer. The run goes on; its records wait in "
                f"{self._directory}: {away}"
            )
        elif self._is_away and not away:
            self._failures.warn(f"{self._server} is back and gets the records that waited")
        self._is_away = away is not None


def _numbered(directory: Path) -> list[Path]:
    """Return the directory's records, oldest first."""
    return sorted(path for path in directory.glob("[0-9]*") if path.name.isdigit())


def _put_back(directory: Path) -> None:
    """Move refused records back under their old numbers, so that they are delivered first."""
    for path in _numbered(directory / _REFUSED):
        path.rename(directory / path.name)


def _kind(path: Path) -> str:
    """Return a record's kind, even if the record is damaged."""
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
