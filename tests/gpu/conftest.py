"""Acceptance tests on GPUs: run them with `make gpu`.

Without the packages of `make setup`, run `python -m pytest tests/gpu`. It needs Python 3.11 or
newer with torch, transformers, numpy, safetensors and pytest. The tests download nothing.

A test is skipped if the machine lacks something that it needs, and the report says what. The most
important tests run first. A failure does not stop the others. The tests write their figures to
`benchmarks/baselines/gpu.json`.

`make gpu REHEARSAL=1` runs the same code on a CPU with tiny shapes. It leaves `gpu.json` alone.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.needs import LIMIT_S, REHEARSAL, REHEARSED_TEST_S, lacking

if REHEARSAL and find_spec("triton") and "TRITON_INTERPRET" not in os.environ:
    # Triton reads this when it is imported. Processes that vLLM starts must not see it, unless you
    # have set it to rehearse engines on the V2 runner.
    os.environ["TRITON_INTERPRET"] = "1"
    import refrain.engines.inference.drafting.refill_kernel
    import refrain.engines.inference.sampling.gpu  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

ORDER = (
    *("step", "engines", "turns", "refill", "run", "trainer", "sampling", "batch_invariance"),
    "two_gpus",
)
"""Test files, the most important first. The first test without the shared engines ends them."""
RECORDED = pytest.StashKey[dict[str, float]]()
TOLD = pytest.StashKey[dict[str, str]]()
BEGUN_S = pytest.StashKey[float]()
FLEET = pytest.StashKey[ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RECORDED] = {}
    config.stash[TOLD] = {}
    config.stash[BEGUN_S] = time.monotonic()
    config.stash[FLEET] = ExitStack()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next(i for i, name in enumerate(ORDER) if f"test_{name}" in item.path.name)

    items.sort(key=place)
    for item in items:
        mark = item.get_closest_marker("needs")
        if mark is None:
            raise pytest.UsageError(f"{item.nodeid} does not say what it needs")
        if config.pluginmanager.hasplugin("timeout"):
            seconds = REHEARSED_TEST_S if REHEARSAL else mark.kwargs["seconds"]
            item.add_marker(pytest.mark.timeout(seconds))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    if "fleet" not in item.fixturenames:
        item.config.stash[FLEET].close()
    for mark in item.iter_markers("needs"):
        gpus, seconds = mark.kwargs["gpus"], mark.kwargs["seconds"]
        if why := lacking(mark.kwargs["what"], gpus, mark.kwargs["rehearsed"]):
            pytest.skip(f"needs {why}")
        left_s = gpus * LIMIT_S - (time.monotonic() - item.config.stash[BEGUN_S])
        if not REHEARSAL and left_s < seconds:
            pytest.skip(
                f"needs up to {seconds:.0f} s: {max(0.0, left_s):.0f} are left "
                f"(REFRAIN_GPU_LIMIT_S, {LIMIT_S:.0f} a card)"
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    told = item.config.stash[TOLD]
    if report.skipped and isinstance(report.longrepr, tuple):
        told[item.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        told[item.nodeid] = "FAILED"
    elif report.when == "call":
        told[item.nodeid] = "ran"
        # Record figures only of tests that pass.
        figures = dict(report.user_properties)
        item.config.stash[RECORDED] |= figures
        if figures and not REHEARSAL:
            # Write them at once: an interrupted suite keeps its figures.
            _record(figures)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    terminalreporter.section("what ran, and what the others lacked")
    for name, told in config.stash[TOLD].items():
        terminalreporter.line(f"{name.rpartition('/')[2]}: {told}")
    figures = config.stash[RECORDED]
    for name in sorted(figures):
        terminalreporter.line(f"{name:60} {figures[name]:,.6g}")
    if figures:
        terminalreporter.line(f"recorded in {_record(figures)}")


def _record(figures: dict[str, float]) -> Path:
    from tests.gpu import record

    path = record.RECORD
    if REHEARSAL:
        path = Path(tempfile.mkdtemp(prefix="refrain-rehearsal-")) / path.name
    record.write(path, record.machine(), figures)
    return path


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device of the tests: the CPU in a rehearsal."""
    return "cpu" if REHEARSAL else "cuda"


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str
) -> Iterator[Any]:
    """Engines that run beside each other. The first test without them stops them."""
    from tests.gpu.fleet import Fleet

    with request.config.stash[FLEET] as running:
        yield running.enter_context(Fleet(tmp_path_factory.mktemp("engines"), device).started())


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return a function that keeps figures, which are recorded if the test passes.

    Each figure has a name of its own, with the unit as suffix.
    """

    def keep(**named: float) -> None:
        for name, value in named.items():
            record_property(name, float(value))

    return keep


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Triton's interpreter in a rehearsal."""
    whats = [mark.kwargs["what"] for mark in request.node.iter_markers("needs")]
    if REHEARSAL and any("triton" in what for what in whats):
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _given_back() -> Iterator[None]:
    """Free the GPU memory that a test no longer uses."""
    from tests.gpu.models import give_back

    yield
    give_back()
