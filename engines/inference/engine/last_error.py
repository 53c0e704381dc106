"""Errors that the processes of an engine wrote before they died: vLLM's own refer to them.

A Ray actor's standard error is a file, and so is that of every process that it starts.
"""

import os
import re
from pathlib import Path

READ_BYTES = 2**18
"""Bytes at the end of the file that are looked at."""
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\) ?)?(ERROR [^\]]*\] ?)?")
"""Process and place in the code, which vLLM writes before each line."""
_REFERS = re.compile(r"(?i)root cause|stack trace|executor failed|^(SystemExit|KeyboardInterrupt)")


def last_error() -> str:
    """The last line of the last traceback in this process's standard error that tells a cause; none
    where that is no file."""
    file = Path(os.readlink("/proc/self/fd/2"))
    if not file.is_file():
        return ""
    with file.open("rb") as text:
        text.seek(max(0, file.stat().st_size - READ_BYTES))
        return find_error(text.read().decode(errors="replace"))


def tells_cause(error: str) -> bool:
    """Whether an error tells its cause: vLLM's tell that it was written above."""
    return not _REFERS.search(error)


def find_error(text: str) -> str:
    """Error that `last_error` finds, in this text; its processes may have written by turns."""
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
