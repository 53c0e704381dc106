"""What a process that runs vLLM is given before vLLM is imported."""

import os
import subprocess
import sys
from pathlib import Path

from engines.shared_memory import clear_dead

KILLED = """
import os, signal, tempfile
from pathlib import Path
from engines.inference.engine.process import prepare_process
prepare_process(1)
assert os.environ["VLLM_RPC_BASE_PATH"] == os.environ["TMPDIR"]
tempfile.tempdir = None
for name in ("socket", "store"):
    (Path(tempfile.gettempdir()) / name).touch()
Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).mkdir()
print(tempfile.gettempdir(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_temporary_files_go_with_a_process_that_is_killed(tmp_path: Path) -> None:
    given = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environment = given | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", KILLED]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert killed.stdout, killed.stderr
    directory = Path(killed.stdout.strip().splitlines()[-1])
    assert len(list(directory.iterdir())) == 2
    clear_dead()
    assert not directory.exists()
    (compiled,) = tmp_path.iterdir()
    assert compiled.name.startswith("torchinductor"), "the next process compiles nothing again"
