"""Runs a program that a model wrote, in namespaces of its own. Linux; the standard library alone.

    scorer ── forks ──► keeper ── forks ──► the program, process 1 of its namespaces

The program sees Python and the system's libraries, read-only, and an empty `/tmp` in memory. It
sees no other file, process, network or variable of yours. Where the scorer is root, the program is
`nobody`. When the keeper ends or is killed, the kernel kills the program with all that it started.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile

MAX_OUTPUT_BYTES = 10_000_000
MAX_MEMORY_BYTES = 2**30
"""Of each process."""
MAX_PROCESSES = 16
"""Processes and threads at a time."""
MAX_FILES_BYTES = 2**26
"""All files together, which are in memory."""
READABLE = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", sys.prefix, sys.base_prefix)
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
NOBODY = 65534

# From Linux's headers: sched.h, sys/mount.h, sys/prctl.h.
NEW_USER = 0x10000000
NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_PID, NEW_NETWORK = 0x20000, 1 << 26, 1 << 27, 1 << 29, 1 << 30
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = (
    1, 2, 4, 8, 1 << 5, 1 << 12, 1 << 14, 1 << 18,
)  # fmt: skip
DETACH = 2
END_WITH_PARENT, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38
KEYCTL, JOIN_NEW_SESSION = {"x86_64": 250, "aarch64": 219}, 1

LIBC = ctypes.CDLL(None, use_errno=True)


def run(program, text, seconds, isolated=True, errors=subprocess.DEVNULL):
    """What a Python program prints when it is given a text, or None where it fails.

    Raises subprocess.SubprocessError where the machine cannot isolate it.
    """
    code = program.encode(errors="replace")
    if b"\0" in code or len(code) > 100_000:
        return None
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as printed,
    ):
        given.write(text.encode(errors="replace"))
        given.seek(0)
        os.fchmod(given.fileno(), 0o444)  # For `/dev/stdin`.
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            stdin=given,
            stdout=printed,
            stderr=errors,
            cwd=directory,
            env=ENVIRONMENT,
            start_new_session=True,
            preexec_fn=lambda: prepare(directory, seconds, isolated),
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill(process)
        printed.seek(0)
        return printed.read(MAX_OUTPUT_BYTES).decode(errors="replace") if code == 0 else None


def what_is_missing():
    """Why this machine cannot isolate a program; None where it can."""
    with tempfile.TemporaryFile() as errors:
        try:
            if run("print('works')", "", 20.0, errors=errors) == "works\n":
                return None
            reason = "Python does not start in it"
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
        errors.seek(0)
        return errors.read(1000).decode(errors="replace") or reason


def kill(process):
    """Kill the keeper, and whatever still has its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def prepare(directory, seconds, isolated):
    """Called in the child, before it becomes the program."""
    try:
        if isolated:
            isolate(directory)
        limit(seconds, isolated)
    except OSError as error:
        os.write(2, str(error).encode())
        raise


def isolate(directory):
    """Leave everything behind."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # The first to go where memory is short.
    others = NEW_MOUNT | NEW_UTS | NEW_IPC | NEW_PID | NEW_NETWORK
    root = os.getuid() == 0
    # Root of a container may lack the capability.
    capable = root and LIBC.unshare(others) == 0
    if not capable:
        if root:
            become_nobody()
        user, group = os.getuid(), os.getgid()
        call("unshare", others | NEW_USER)
        keep_ids(user, group, os.open("/proc/self", os.O_DIRECTORY))
    become_first_process()
    own = os.open("/proc/self", os.O_DIRECTORY)
    enter(directory)
    if capable:
        become_nobody()
        call("unshare", NEW_USER)
        keep_ids(NOBODY, NOBODY, own)
    # The kernel's keys of this session, such as Kerberos tickets, stay behind.
    LIBC.syscall(KEYCTL[os.uname().machine], JOIN_NEW_SESSION, None)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call("prctl", END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


def become_nobody():
    """Give up root's user, groups and capabilities."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", DUMPABLE, 1, 0, 0, 0)  # Or `/proc/self` is not its own.


def keep_ids(user, group, own):
    """Map the user and the group to themselves: no other exists then. `own` is `/proc/self`."""
    ids = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in ids.items():
        file = os.open(name, os.O_WRONLY, dir_fd=own)
        os.write(file, text.encode())
        os.close(file)
    os.close(own)


def become_first_process():
    """Fork. The parent stays behind as the keeper and ends as the child does."""
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    child = os.fork()
    if child == 0:
        call("prctl", END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        return
    for descriptor in filter(lambda one: one > 2, descriptors):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _, status = os.waitpid(child, 0)
    os._exit(0 if status == 0 else 1)


def enter(directory):
    """Make a tree in memory the root, and let go of the old one."""
    call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    options = f"size={MAX_FILES_BYTES},nr_inodes=10000,mode=755".encode()
    call("mount", b"tmpfs", directory.encode(), b"tmpfs", NO_SETUID | NO_DEVICES, options)
    os.umask(0o022)
    for path in sorted({*READABLE, *map(os.path.realpath, READABLE)}) + list(DEVICES):
        show(path, directory + path)
    for name in ("proc", "tmp"):
        os.mkdir(f"{directory}/{name}")
    os.chmod(f"{directory}/tmp", 0o1777)
    # A container may forbid it. Without it a program lacks `/dev/stdin` and the like.
    flags = NO_SETUID | NO_DEVICES | NO_EXEC
    if LIBC.mount(b"proc", f"{directory}/proc".encode(), b"proc", flags, None) == 0:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.symlink(f"/proc/self/fd/{number}", f"{directory}/dev/{name}")
    os.chdir(directory)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/tmp")


def show(path, place):
    """Show a file or a directory there, read-only unless it is a device."""
    if os.path.lexists(place) or not os.path.exists(path):
        return
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.mkdir(place)
    else:
        open(place, "x").close()
    call("mount", path.encode(), place.encode(), None, BIND | RECURSIVE, None)
    if path not in DEVICES:
        # What is forbidden already must stay so.
        kept = os.statvfs(place).f_flag & NO_EXEC
        flags = REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES | kept
        call("mount", None, place.encode(), None, flags, None)


def limit(seconds, isolated):
    """Limits of each process of the program."""
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: MAX_MEMORY_BYTES,
        resource.RLIMIT_FSIZE: MAX_OUTPUT_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if isolated:  # Elsewhere all processes of the user count.
        limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def call(name, *arguments):
    """Call the C library. Raises OSError."""
    if LIBC[name](*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
