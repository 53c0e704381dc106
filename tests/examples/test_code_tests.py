"""The example's sandbox for code that models write. Hostile programs reach nothing, good programs
still run, and a machine that cannot isolate programs is refused."""

import ctypes
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from refrain.engines.reward.scorer import check_reward
from refrain.schemas.reward import FunctionReward
from tests.conftest import REPOSITORY
from tests.reward.test_process import marked, wait_until

EXAMPLE = REPOSITORY / "examples" / "code_tests"
SYSTEM_PYTHON = "/usr/bin/python3"
OTHER_USER = 12345


def load() -> Any:
    spec = importlib.util.spec_from_file_location("sandbox", EXAMPLE / "sandbox.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SANDBOX = load()

ATTACKS = {
    "read a file": "print('HARM', open({secret!r}).read())",
    "find a file": "import os; os.path.exists({secret!r}) and print('HARM')",
    "read it by a file descriptor": """
import os
for fd in range(3, 256):
    try: os.stat(fd); print("HARM", fd)
    except OSError: pass""",
    "write a file": "open({outside!r}, 'w').write('x'); print('HARM')",
    "write into Python": """
import json, sys
open(json.__file__, "a").write("#")
print("HARM")""",
    "connect": """
import socket
socket.create_connection(("127.0.0.1", {port}), 2)
print("HARM")""",
    "connect to an abstract socket": """
import socket
socket.socket(socket.AF_UNIX).connect("\\0{abstract}")
print("HARM")""",
    "resolve a name": "import socket; print('HARM', socket.gethostbyname('example.org'))",
    "find its parent": "import os; os.getppid() and print('HARM')",
    "kill another": "import os; os.kill({victim}, 9); print('HARM')",
    "trace another": """
import ctypes
print("HARM" if ctypes.CDLL(None).ptrace(16, {victim}, 0, 0) == 0 else "no")""",
    "read its memory": "open('/proc/{victim}/mem', 'rb'); print('HARM')",
    "read the environment": """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if "SECRET_KEY" in open("/proc/" + pid + "/environ").read(): print("HARM")
    except OSError: pass
if "SECRET_KEY" in os.environ: print("HARM")""",
    "read a key of the session": """
import ctypes
libc = ctypes.CDLL(None)
if libc.syscall({request_key}, b"user", b"{abstract}", None, 0) > 0: print("HARM")""",
    "become root": """
import os
os.setuid(0)
print("HARM")""",
    "escape by a chroot of its own": """
import ctypes, os
libc = ctypes.CDLL(None)
print(libc.unshare(0x10020000))
libc.umount2(b"/", 2)
os.mkdir("inner"); os.chroot("inner")
for _ in range(64): os.chdir("..")
os.chroot(".")
if os.path.exists({secret!r}): print("HARM")""",
    "mount what is outside": """
import ctypes
libc = ctypes.CDLL(None)
libc.unshare(0x10020000)
for kind in (b"ext4", b"overlay", b"devtmpfs", b"sysfs", b"cgroup2"):
    if libc.mount(b"none", b"/tmp", kind, 0, None) == 0 and kind != b"sysfs": print("HARM", kind)
if libc.mount(None, b"/usr", None, 4128, None) == 0: print("HARM")""",
    "much memory": "print('HARM', len(bytearray(2**31)))",
    "a core of time": "while True: pass",
    "endless output": "while True: print('x' * 2**16)",
    "a large file": """
import os
for number in range(20):
    with open(f"/tmp/{{number}}", "wb") as file: file.write(bytes(8_000_000))
print("HARM")""",
    "many files": """
for number in range(20_000): open(f"/tmp/{{number}}", "w").close()
print("HARM")""",
}
FORKS = """
import os, sys, time
try:
    for number in range(100):
        if os.fork() == 0:
            os.setsid()
            os.execv(sys.executable, ["python", "-c", "import time; time.sleep(600)", {mark!r}])
except BlockingIOError: pass
print(number)
if {waits}: time.sleep(600)
"""
RIGHT = {
    "print(sum(map(int, input().split())))": "3\n",
    "import sys; print(sys.stdin.read().split()[1])": "2\n",
    "print(open('/dev/stdin').read().split()[0])": "1\n",
    "import os; open('note', 'w').write('x'); print(os.listdir('/tmp'))": "['note']\n",
    """
import sys, threading
sys.setrecursionlimit(10**6); threading.stack_size(2**27)
def depth(n): return n and 1 + depth(n - 1)
thread = threading.Thread(target=lambda: print(depth(10_000))); thread.start(); thread.join()""": (
        "10000\n"
    ),
    "import subprocess; print(subprocess.check_output(['echo', 'hi'], text=True))": "hi\n\n",
    "import decimal, heapq, ssl, sqlite3, zlib; print('é')": "é\n",
}


@pytest.fixture(scope="module")
def own() -> Iterator[dict[str, Any]]:
    """Create targets to attack: a file, a port, a socket, a process and a key of the user."""
    if reason := SANDBOX.what_is_missing():
        pytest.skip(f"no sandbox here: {reason}")
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        secret = Path(directory, "secret")
        secret.write_text("key")
        secret.chmod(0o600)
        name = f"refrain-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        victim = subprocess.Popen(["sleep", "600"], env={"SECRET_KEY": "1"})
        keys = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
        libc = ctypes.CDLL(None)
        key = libc.syscall(keys, b"user", name.encode(), b"secret", 6, -3)
        assert key > 0, "cannot add a key to this session"
        yield {
            "secret": str(secret),
            "outside": str(Path(directory, "outside")),
            "port": server.getsockname()[1],
            "abstract": name,
            "victim": victim.pid,
            "request_key": keys + 1,
        }
        libc.syscall(keys + 2, 3, key)
        victim.kill()
        assert victim.wait() == -9


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_program_reaches_nothing(own, attack):
    before = sorted(Path(own["secret"]).parent.iterdir())
    seconds = 0.5 if "while" in ATTACKS[attack] else 5.0
    printed = SANDBOX.run(ATTACKS[attack].format(**own), "", seconds)
    assert "HARM" not in (printed or "")
    assert len(printed or "") <= SANDBOX.MAX_OUTPUT_BYTES
    assert sorted(Path(own["secret"]).parent.iterdir()) == before
    assert psutil.Process(own["victim"]).status() == psutil.STATUS_SLEEPING


def test_the_same_programs_do_harm_without_a_sandbox(own):
    """Negative control of the test above."""
    of_root = {"become root", "mount what is outside", "escape by a chroot of its own"}
    dangerous = {"kill another", "trace another", "write into Python", "resolve a name"}
    costly = {"many files", "a core of time", "endless output", "much memory", "a large file"}
    harmless = {"read it by a file descriptor"}
    for attack in ATTACKS.keys() - of_root - dangerous - costly - harmless:
        printed = SANDBOX.run(ATTACKS[attack].format(**own), "", 5.0, isolated=False)
        assert "HARM" in (printed or ""), attack
    Path(own["outside"]).unlink()


@pytest.mark.parametrize("waits", [False, True])
def test_child_processes_are_bounded_and_end(own, tmp_path, waits):
    del own
    mark = f"mark-{tmp_path}"
    printed = SANDBOX.run(FORKS.format(mark=mark, waits=waits), "", 2.0 if waits else 10.0)
    assert printed is None if waits else int(printed) < SANDBOX.MAX_PROCESSES
    wait_until(lambda: not marked(mark), "all are gone")


@pytest.mark.parametrize("program", RIGHT)
def test_right_programs_still_run(own, program):
    del own
    assert SANDBOX.run(program, "1 2", 10.0) == RIGHT[program]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
@pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason="needs a Python that others can run")
def test_sandbox_holds_for_unprivileged_users(own):
    """Run all attacks as another user, on a file and a process of that user."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(EXAMPLE / "sandbox.py", directory)
        secret = Path(directory, "secret")
        secret.write_text("key")
        secret.chmod(0o600)
        os.chown(secret, OTHER_USER, OTHER_USER)
        os.chmod(directory, 0o755)
        victim = subprocess.Popen(["sleep", "600"], user=OTHER_USER, extra_groups=[])
        named = own | {"secret": str(secret), "victim": victim.pid}
        programs = [
            program.format(**named) for program in ATTACKS.values() if "while" not in program
        ]
        driver = (
            "import json, sys; import sandbox\n"
            "print(json.dumps([sandbox.what_is_missing(),"
            " *(sandbox.run(one, '', 5.0) for one in json.load(sys.stdin))]))"
        )
        done = subprocess.run(
            [SYSTEM_PYTHON, "-c", driver],
            input=json.dumps([*programs, *RIGHT]),
            cwd=directory,
            capture_output=True,
            text=True,
            user=OTHER_USER,
            group=OTHER_USER,
            extra_groups=[],
            check=True,
        )
        assert victim.poll() is None
        victim.kill()
        victim.wait()
    missing, *printed = json.loads(done.stdout)
    assert missing is None
    assert "HARM" not in str(printed)
    assert len(printed) > len(programs)


def refuse(directory: Path) -> FunctionReward:
    """Return the reward of the example on a machine that seems to have no namespaces."""
    shutil.copy(EXAMPLE / "reward.py", directory)
    lacks = "def what_is_missing(): return 'unshare: Operation not permitted'\n"
    source = (EXAMPLE / "sandbox.py").read_text()
    (directory / "sandbox.py").write_text(source + lacks)
    return FunctionReward(path=directory / "reward.py")


def test_a_machine_without_a_sandbox_is_refused_unless_that_is_accepted(tmp_path, monkeypatch):
    config = refuse(tmp_path)
    with pytest.raises(ValueError, match=r"cannot isolate programs .*not permitted") as refused:
        check_reward(config, set())
    assert "Traceback" not in str(refused.value)
    assert "export CODE_TESTS_WITHOUT_SANDBOX=1" in str(refused.value)
    monkeypatch.setenv("CODE_TESTS_WITHOUT_SANDBOX", "1")
    with pytest.raises(ValueError, match="cannot isolate"):
        check_reward(config, set())
    named = {"environment": ("CODE_TESTS_WITHOUT_SANDBOX",)}
    check_reward(config.model_copy(update=named), set())


def test_the_machine_is_tried_and_not_asked():
    """The check tries to make a user namespace. Here it runs in one that allows no others."""
    closed = "echo 0 > /proc/sys/user/max_user_namespaces && exec "
    driver = f"{closed} {sys.executable} -c 'import sandbox; print(sandbox.what_is_missing())'"
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", driver]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no user namespaces here: {done.stderr}")
    assert "Operation not permitted" in done.stdout


def test_the_example_imports_nothing_of_refrain():
    for name in ("reward.py", "sandbox.py"):
        assert "refrain" not in (EXAMPLE / name).read_text().replace("refrain train", "")
