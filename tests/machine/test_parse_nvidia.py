"""Parsers of the texts that NVIDIA's driver and tools write."""

import pytest

from refrain.engines.machine.parse_nvidia import parse_driver, parse_gpus, parse_links
from tests.machine.machines import GIB

CLOSED = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@x)
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""
SHORT = "NVRM version: NVIDIA UNIX aarch64 Kernel Module  580.65  Tue Jul 15 2025\n"
FOUR = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV4\tSYS\tNODE\tPXB\t0-31\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tPHB\tSYS\tPXB\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tNV4\tSYS\t32-63\t1\t\tN/A\n"
    "GPU3\tNODE\tSYS\tNV4\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n\nLegend:\n"


@pytest.mark.parametrize(
    ("text", "version"),
    [(CLOSED, "535.183.01"), (OPEN, "580.95.05"), (SHORT, "580.65"), ("GCC version: 13.3", None)],
)
def test_the_driver(text: str, version: str | None) -> None:
    assert parse_driver(text) == version


def test_gpus_and_what_is_not_known_of_them() -> None:
    first, second, third = parse_gpus(
        "0, NVIDIA H100 80GB HBM3, 9.0, 81559, 81079\n"
        "1, NVIDIA GB10, 12.1, [N/A], [N/A]\n"
        "7, Tesla K80, [Not Supported], 11441, 11441\n"
    )
    assert (first.index, first.name, first.compute_capability) == (
        0,
        "NVIDIA H100 80GB HBM3",
        (9, 0),
    )
    assert (first.memory_bytes, first.free_bytes) == (81559 * GIB // 1024, 81079 * GIB // 1024)
    assert (second.compute_capability, second.memory_bytes, second.free_bytes) == (
        (12, 1),
        None,
        None,
    )
    assert (third.index, third.compute_capability) == (7, None)


@pytest.mark.parametrize("text", ["", "\n"])
def test_no_gpu(text: str) -> None:
    assert parse_gpus(text) == ()
    assert parse_links(text) == {}


def test_links_of_each_pair() -> None:
    assert parse_links(FOUR) == {
        "0-1": "NV4",
        "0-2": "SYS",
        "0-3": "NODE",
        "1-2": "PHB",
        "1-3": "SYS",
        "2-3": "NV4",
    }
    assert parse_links(ONE) == {}
