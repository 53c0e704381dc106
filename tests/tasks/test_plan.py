"""A run is planned once, before anything starts."""

import ast
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import refrain.flows.prepare
import refrain.flows.train
import refrain.tasks.run.plan
from refrain.engines.actors import ActorGone
from refrain.flows.config_file import load_config
from refrain.flows.launch import launch_train
from refrain.flows.prepare import print_plan, training_plan
from refrain.tasks.run.plan import RunPlan
from refrain.tasks.run.run_dir import claim_run_dir, read_config
from tests.conftest import REPOSITORY
from tests.flows.commands import write_config

RESOLVERS = {
    "with_local_model": refrain.flows.prepare,
    "with_gpu_split": refrain.tasks.run.plan,
    "dated": refrain.tasks.run.plan,
    "plan_training": refrain.tasks.run.plan,
    "plan_engines": refrain.tasks.run.plan,
    "check_resumable": refrain.tasks.run.plan,
}
"""Functions that resolve a part of a run, and the only module that uses each."""
ONCE = {name: 1 for name in RESOLVERS if name not in ("plan_engines", "check_resumable")}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of the resolvers."""
    counted: Counter[str] = Counter()

    def count(name: str, module: Any) -> None:
        resolve = getattr(module, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return resolve(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)

    for name, module in RESOLVERS.items():
        count(name, module)
    return counted


@pytest.mark.parametrize("name", RESOLVERS)
def test_one_module_uses_each_resolver(name: str) -> None:
    found = [
        path
        for room in ("flows", "tasks")
        for path in (REPOSITORY / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == name
    ]
    assert {str(path) for path in found} == {str(Path(RESOLVERS[name].__file__ or "").resolve())}


def test_a_check_plans_once(tmp_path: Path, calls: Counter[str]) -> None:
    launch_train(write_config(tmp_path), (), None, overwrite=False, check=True)
    assert calls == ONCE


async def test_a_flow_plans_once_even_if_it_crashes(
    tmp_path: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[RunPlan] = []

    @asynccontextmanager
    async def open_run(plan: RunPlan) -> AsyncGenerator[Any]:
        claim_run_dir(plan.config, plan.resume).release()
        opened.append(plan)
        if len(opened) < 3:
            raise ActorGone("store", "killed")
        raise ValueError("enough")
        yield

    monkeypatch.setattr(refrain.flows.train, "open_run", open_run)
    config = load_config(write_config(tmp_path), ["trainer.max_failures=5"])
    with pytest.raises(ValueError, match="enough"):
        await refrain.flows.train.train.fn(config)
    assert calls == ONCE | {"check_resumable": 2}
    first, second, third = opened
    assert (first.resume, second.resume, third.resume) == (False, True, True)
    assert first.config == second.config == third.config == read_config(config.run_dir)
    assert first.inputs is second.inputs is third.inputs


def test_a_plan_of_a_plan_is_the_same(tmp_path: Path) -> None:
    """The flow plans again what the command line has planned."""
    first = training_plan(load_config(write_config(tmp_path)), resume=False)
    second = training_plan(first.config, resume=False)
    # Other processes of the machine use its disk too.
    assert dataclasses.replace(second, memory=first.memory) == first
    assert second.inputs is first.inputs


def test_a_plan_is_frozen(tmp_path: Path) -> None:
    plan = training_plan(load_config(write_config(tmp_path)), resume=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.resume = True  # ty: ignore[invalid-assignment]


def test_a_printed_plan_names_each_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@mlflow:5000")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    plan = training_plan(load_config(write_config(tmp_path)), resume=False)
    print_plan(plan)
    printed = capsys.readouterr().out
    assert f"  store       {plan.config.run_dir.absolute() / 'refrain.duckdb'}\n" in printed
    assert "  engines     2 of TP 1\n" in printed
    assert "  MLflow      http://mlflow:5000\n" in printed
    assert "secret" not in printed
    assert {"profile", "model", "Ray", "Prefect"} <= {line.split()[0] for line in lines(printed)}


def lines(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.strip()]
