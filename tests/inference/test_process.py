"""Files and shared memory of an engine's processes are deleted after they are killed."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.shared_memory import clear_dead, shared_memory

CORE = """
import multiprocessing, os, signal
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from tqdm import tqdm
from refrain.engines.inference.engine.plugin import own_shared_memory
own_shared_memory()
multiprocessing.set_start_method("spawn")
kept = SharedMemory(create=True, size=100), multiprocessing.Lock()
import joblib
kept = *kept, multiprocessing.Lock(), tqdm([])
for process in (resource_tracker._resource_tracker._pid, os.getpid()):
    os.kill(process, signal.SIGKILL)
"""
ENGINE = f"""
import os, signal, subprocess, sys, tempfile
from pathlib import Path
from refrain.engines.inference.engine.process import prepare_process
prepare_process(1)
assert os.environ["VLLM_RPC_BASE_PATH"] == os.environ["TMPDIR"]
tempfile.tempdir = None
(Path(tempfile.gettempdir()) / "socket").touch()
assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(Path(sys.argv[1]) / "refrain-"))
core = subprocess.run([sys.executable, "-c", {CORE!r}])
assert core.returncode == -signal.SIGKILL
print(tempfile.gettempdir(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


HAS_SHARED_MEMORY = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="has no /dev/shm")


@HAS_SHARED_MEMORY
def test_killed_engine_leaves_no_files(tmp_path: Path) -> None:
    given = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environment = given | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", ENGINE, str(tmp_path)]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert killed.stdout, killed.stderr
    directory = Path(killed.stdout.strip().splitlines()[-1])
    assert [path.name for path in directory.iterdir()] == ["socket"]
    named = sorted(path.name for path in shared_memory().glob(f"*{directory.name}-*"))
    assert len(named) >= 3, named
    assert len([name for name in named if name.startswith("sem.")]) >= 2
    clear_dead()
    assert not directory.exists()
    assert not list(shared_memory().glob(f"*{directory.name}*"))
    (kept,) = tmp_path.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert [path.name for path in kept.iterdir()] == ["torchinductor"], (
        "only the compile cache stays"
    )


@HAS_SHARED_MEMORY
@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"),
    reason="vLLM's ranks talk through segments where the CPU has AVX-512, else through gloo",
)
@pytest.mark.engine
async def test_segments_of_ranks_on_cpus_go_with_their_engine(tp2: RayEngine) -> None:
    assert tp2.tp_degree == 2
    segments = [path.name for path in shared_memory().glob("refrain-*-cpushm*")]
    owners = {path.name for path in shared_memory().iterdir() if path.is_dir()}
    assert {name[: len("refrain-") + 8] for name in segments} & owners
