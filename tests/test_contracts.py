"""Each import contract is broken by an import that it forbids."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
ONE_WAY = "Imports go one way"
ONLY_INFERENCE = "Only engines.inference touches vLLM"
ROLLOUT = "Rollouts are coordinated without engines, actors and tensors"
DECIDING = "Deciding is separate from doing"
NO_PREFECT = "Engines do not know what orchestrates them"
ROOMS = "Rooms of engines import one way"
SCHEMAS = "Schemas need pydantic and the standard library only"
LATE = "def _later() -> None:\n    "
FORBIDDEN = [
    (ONE_WAY, "flows/bench.py", "import refrain.benchmarks.index"),
    (ONE_WAY, "flows/simulate_input.py", f"{LATE}from refrain.benchmarks.papers import settings"),
    (ONE_WAY, "engines/simulate/engine.py", "import refrain.benchmarks.papers.settings"),
    (ONE_WAY, "tasks/rollout.py", "import refrain.flows.train"),
    (ONE_WAY, "engines/learn/trainer.py", f"{LATE}from refrain.tasks.run import live"),
    (ONE_WAY, "schemas/config.py", "import refrain.engines.balance"),
    (ONLY_INFERENCE, "tasks/rollout.py", "from vllm import LLM"),
    (ONLY_INFERENCE, "engines/learn/trainer.py", f"{LATE}import vllm"),
    *((ROLLOUT, "engines/rollout/mover.py", f"import {name}") for name in ("vllm", "ray", "torch")),
    (ROLLOUT, "engines/rollout/moves.py", "import refrain.engines.inference.engine.ray_engine"),
    (DECIDING, "engines/control/controller.py", "import ray"),
    (DECIDING, "engines/pat/costs.py", f"{LATE}import torch"),
    (DECIDING, "engines/simulate/clock.py", "import refrain.engines.store.actor"),
    (NO_PREFECT, "engines/store/actor.py", "import prefect"),
    (ROOMS, "engines/reports/markdown.py", "import refrain.engines.tracking.outbox"),
    (ROOMS, "engines/accounting/metrics.py", f"{LATE}import refrain.engines.reports.ladder"),
    (ROOMS, "engines/histospec/drafting.py", "import refrain.engines.inference.sampling.cpu"),
    (ROOMS, "engines/machine/plan.py", f"{LATE}import refrain.engines.learn.policy"),
    (ROOMS, "engines/histopipe/ranking.py", "import refrain.engines.pat.costs"),
    (SCHEMAS, "schemas/step.py", "import numpy"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the packages that the contracts cover."""
    directory = tmp_path_factory.mktemp("source")
    links = [file.parent for file in (REPOSITORY / "refrain").glob("*/__init__.py")]
    assert len(links) == 5
    only_code = shutil.ignore_patterns("__pycache__", "baselines")
    for package in ("refrain", *(link.name for link in links)):
        copied = directory / package
        shutil.copytree(REPOSITORY / package, copied, symlinks=True, ignore=only_code)
    shutil.copy(REPOSITORY / "pyproject.toml", directory)
    return directory


def _report(source: Path) -> str:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "Could not" not in done.stdout, done.stdout
    return done.stdout


def _broken(source: Path, files: Iterable[str] = (), line: str = "") -> tuple[set[str], str]:
    """Append a line to each file. Return the contracts that break, and the report."""
    originals = {source / file: (source / file).read_text() for file in files}
    try:
        for file, text in originals.items():
            file.write_text(f"{text}\n{line}\n")
        report = _report(source)
    finally:
        for file, text in originals.items():
            file.write_text(text)
    names = [contract["name"] for contract in SETTINGS["contracts"]]
    return {name for name in names if f"{name} BROKEN" in report}, report


def test_all_contracts_are_kept_by_the_copy(source: Path) -> None:
    broken, report = _broken(source)
    assert not broken
    assert f"Contracts: {len(SETTINGS['contracts'])} kept, 0 broken" in report


def test_every_contract_has_an_import_that_breaks_it() -> None:
    assert {contract for contract, *_ in FORBIDDEN} == {c["name"] for c in SETTINGS["contracts"]}


@pytest.mark.parametrize(("contract", "file", "line"), FORBIDDEN, ids=lambda text: text[-40:])
def test_forbidden_import_breaks_its_contract(
    source: Path, contract: str, file: str, line: str
) -> None:
    broken, report = _broken(source, [file], line)
    assert contract in broken, report


@pytest.mark.parametrize("library", ["vllm", "ray", "torch"])
def test_contract_covers_each_rollout_file(source: Path, library: str) -> None:
    files = [str(f.relative_to(source)) for f in (source / "engines" / "rollout").glob("*.py")]
    _, report = _broken(source, files, f"import {library}")
    imported = {f.removesuffix(".py").removesuffix("/__init__") for f in files}
    imported = {f"refrain.{file.replace('/', '.')}" for file in imported}
    assert {module for module in imported if f"{module} -> {library} " in report} == imported


def test_each_room_of_engines_keeps_off_vllm_or_is_inference(source: Path) -> None:
    (only,) = (c for c in SETTINGS["contracts"] if c["name"] == ONLY_INFERENCE)
    rooms = {
        f"refrain.engines.{init.parent.name}" for init in (source / "engines").glob("*/__init__.py")
    }
    assert rooms - set(only["source_modules"]) == {"refrain.engines.inference"}


def test_the_architecture_page_shows_the_order_of_rooms() -> None:
    (layers,) = [one["layers"] for one in SETTINGS["contracts"] if one["name"] == ROOMS]
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    picture = "\n".join(layer.replace(" | ", "   ") for layer in layers)
    assert f"```text\n{picture}\n```" in page, f"docs/architecture.md should show\n{picture}"
    rooms = {room for layer in layers for room in layer.split(" | ")}
    folders = {file.parent.name for file in (REPOSITORY / "engines").glob("*/__init__.py")}
    assert rooms == folders
