"""Memory limits of control groups, and the refusal of runs that need more memory."""

from pathlib import Path

import psutil
import pytest

from refrain.engines.machine.host import HostNeed, require_room
from refrain.engines.machine.memory import host_memory, memory_limits
from refrain.engines.pat.memory import CPU_PROCESS_BYTES, host_footprint

GB = int(1e9)


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_limits_of_all_groups_above(tmp_path: Path) -> None:
    write(tmp_path, memory__current=99)
    write(tmp_path / "pod", memory__max=8 * GB, memory__current=5 * GB)
    (tmp_path / "pod" / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GB}\n")
    write(tmp_path / "pod" / "box", memory__max="max", memory__current=GB)
    assert list(memory_limits("0::/pod/box\n", tmp_path)) == [(8 * GB, 3 * GB)]


def test_the_first_version_of_groups(tmp_path: Path) -> None:
    none = 9223372036854771712
    memory = tmp_path / "memory"
    write(memory, memory__limit_in_bytes=none, memory__usage_in_bytes=GB)
    write(memory / "docker" / "1a", memory__limit_in_bytes=4 * GB, memory__usage_in_bytes=GB)
    text = "12:cpu,cpuacct:/other\n5:memory:/docker/1a\n"
    assert list(memory_limits(text, tmp_path)) == [(4 * GB, GB)]


def test_a_path_of_the_hosts_leaves_the_mounts_own_files(tmp_path: Path) -> None:
    write(tmp_path, memory__max=2 * GB, memory__current=GB)
    assert list(memory_limits("0::/kubepods/x\n", tmp_path)) == [(2 * GB, GB)]
    assert list(memory_limits("", tmp_path)) == []


def test_memory_of_this_machine() -> None:
    total, free = host_memory()
    assert 0 < free <= total <= psutil.virtual_memory().total


def need(num_engines: int, num_trainers: int, num_params: int = GB) -> HostNeed:
    engines = host_footprint(4 * num_params, (1,), 0.25 * GB, num_engines)
    return HostNeed(num_engines, engines, num_trainers, num_params)


def test_a_run_by_hand() -> None:
    assert need(2, 0).bytes == 2 * (4 * GB + 0.25 * GB + CPU_PROCESS_BYTES)
    assert need(2, 3).trainer_bytes == 16 * GB + 3 * CPU_PROCESS_BYTES


def test_runs_too_large_for_hosts_are_refused() -> None:
    whole = need(64, 1, 10**6)
    require_room(whole, whole.bytes / 0.94)
    with pytest.raises(
        ValueError,
        match=r"55\.3 GB of memory \(54\.7 GB for 64 .*, but only 22\.8 GB .*num_engines",
    ):
        require_room(whole, 24 * GB)
