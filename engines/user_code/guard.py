"""Script that runs a command and ends it with all that it starts. It imports nothing of refrain.

    parent ── socket ──► guard ── starts ──► command, in a session and process group of its own

The guard first writes the command's process group to the socket, as a line. It ends when the
command ends or when the parent's end of the socket closes. If the parent is killed, the kernel
closes that end. Before it ends, the guard kills the command's group. Orphans that have left the
group become the guard's children (subreaper), and it kills them too. If the guard is killed, the
kernel kills the command.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLEAR_S = 20.0
"""Time limit for killing all processes."""
SIGNALLED = 128
"""Exit code of a command that signal n ended, minus n, as in a shell."""


def guard(descriptor: int, command: list[str]) -> int:
    """Run the command and return its exit code. The command inherits the socket, and waits there
    until the parent has read the process group."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own = os.getpid()

    def end_with_guard() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != own:
            os._exit(1)

    process = subprocess.Popen(
        command, pass_fds=[descriptor], start_new_session=True, preexec_fn=end_with_guard
    )
    os.write(descriptor, b"%d\n" % process.pid)
    watch = threading.Thread(target=_end_with_parent, args=(descriptor, process.pid), daemon=True)
    watch.start()
    code = _wait_for(process.pid)
    _kill_all(process.pid)
    return code if code >= 0 else SIGNALLED - code


def _end_with_parent(descriptor: int, group: int) -> None:
    hangup = select.poll()
    hangup.register(descriptor, 0)
    hangup.poll()
    _kill_group(group)


def _wait_for(pid: int) -> int:
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _kill_all(group: int) -> None:
    """Kill the group, then the processes that left it, generation by generation."""
    _kill_group(group)
    deadline = time.monotonic() + CLEAR_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                for pid in _children():
                    with suppress(ProcessLookupError):
                        _kill_group(os.getpgid(pid))
                time.sleep(0.01)


def _children() -> Iterator[int]:
    own = str(os.getpid())
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat") as stat:
            # The process name may hold any character. State and parent come after it.
            if stat.read().rpartition(")")[2].split()[1] == own:
                yield int(name)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
