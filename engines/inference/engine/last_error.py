"""Find the error that killed an engine, in what its processes wrote before they died.

vLLM's own error often says only "see the root cause above". Ray sends the standard error of an
actor, and of every process that it starts, to a file. We search the end of that file.
"""

import os
import re
from pathlib import Path

READ_BYTES = 2**18
"""Bytes to read at the end of the file."""
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\) ?)?(ERROR [^\]]*\] ?)?")
"""vLLM's prefix of each line: the process and the place in the code."""
_REFERS = re.compile(r"(?i)root cause|stack trace|executor failed|^(SystemExit|KeyboardInterrupt)")


def last_error() -> str:
    """Return the error of the last traceback in this process's standard error that names a cause.

    Return "" if there is none, or if standard error is not a file.
    """
    file = Path(os.readlink("/proc/self/fd/2"))
    if not file.is_file():
        return ""
    with file.open("rb") as text:
        text.seek(max(0, file.stat().st_size - READ_BYTES))
        return find_error(text.read().decode(errors="replace"))


def tells_cause(error: str) -> bool:
    """Return whether an error names its cause. Some of vLLM's only point to the lines above."""
    return not _REFERS.search(error)


def find_error(text: str) -> str:
    """Return what `last_error` finds, in this text. Lines of several processes may alternate."""
    found, inside, ignored = "", set(), False
    for raw in text.splitlines():
        prefix = _PREFIX.match(raw)
        assert prefix
        process, line = prefix[1], raw[prefix.end() :]
        if line.startswith("Traceback (most recent call last)"):
            if not ignored:
                inside.add(process)
        elif process in inside and line and not line[0].isspace():
            inside.discard(process)
            found = line if tells_cause(line) else found
        ignored = line.startswith("Exception ignored in")
    return found
