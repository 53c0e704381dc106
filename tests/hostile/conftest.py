"""Fixtures: a directory with hostile files, and a process that runs commands on them."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.driver_client import Driver
from tests.hostile.place import HostilePlace


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> HostilePlace:
    return HostilePlace(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="package")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """Compile the library that simulates a failing disk. Return None without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        return None
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return library


@pytest.fixture(scope="package")
def driver(place: HostilePlace, shim: Path | None) -> Iterator[Driver]:
    driver = Driver(place.directory, shim)
    yield driver
    driver.close()
