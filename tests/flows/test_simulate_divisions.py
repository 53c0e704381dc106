"""`refrain simulate --divide N`: its rows, its recommendation and its errors."""

from pathlib import Path

import pytest

from refrain.engines.simulate.trace import from_store, trained_token_s
from refrain.engines.store.store import Store
from refrain.schemas.config import TrainConfig
from refrain.tasks.run.config_record import write_config
from tests.flows.test_simulate import (
    a_directory,  # noqa: F401
    refrain,
    simulated,
    succeed,
    write_profile,
    write_store,
)
from tests.store.test_store import make_report

T = "trace.parquet"
FORMULA = ("--hardware", "H100", "--shape", "Qwen3-1.7B")
DIVIDED = ("--divide", "4", *FORMULA)
ONE_SET = ("--policies", "ranked")


def rows_of(*args: str | Path) -> list[dict]:
    return simulated(*args)["rows"]


def test_every_division_has_a_row_and_the_fastest_is_recommended() -> None:
    found = simulated(T, *DIVIDED)
    rows = [row for row in found["rows"] if row["policy_set"] == "ranked"]
    assert len(found["rows"]) == 2 * len(rows) == 2 * 7
    assert [(row["mode"], row["placement"], row["engine_gpus"]) for row in rows] == [
        ("sync", "shared", 4),
        *(("sync", "split", num) for num in (1, 2, 3)),
        *(("pipelined", "split", num) for num in (1, 2, 3)),
    ]
    for prefix, among in (
        ("ranked_", rows),
        ("ranked_on_policy_", [row for row in rows if row["mode"] == "sync"]),
    ):
        best = min(among, key=lambda row: row["step_s"])
        assert found["figures"][f"{prefix}step_s"] == best["step_s"]
        assert found["figures"][f"{prefix}recommended"] == (
            f"staleness={int(best['mode'] == 'pipelined')} placement={best['placement']} "
            f"rollout.num_engines={best['engine_gpus']} "
            f"trainer.num_processes={best['trainer_gpus']}"
        )


def test_divisions_are_labelled_as_a_simulation() -> None:
    said = succeed(T, *DIVIDED, *ONE_SET).output
    assert said.startswith(
        "SIMULATION of trace.parquet: 4 H100, engines of TP 1; rollouts: formula"
    )
    assert "training: formula; hand-over: formula" in said
    assert said.count("fastest") == 1
    assert "sync shared" in said
    assert "recommended: staleness=" in said
    assert "times as long" in said


def test_memory_decides_with_the_time() -> None:
    found = simulated(T, "--divide", "4", "--hardware", "H100", "--shape", "Qwen3-8B", *ONE_SET)
    assert {row["trainer_gpus"] for row in found["rows"] if row["lacks"]} == {1, 2}
    best = found["figures"]["ranked_recommended"]
    assert best.endswith(("trainer.num_processes=3", "trainer.num_processes=4"))
    said = succeed(T, "--divide", "1", "--hardware", "A40", "--shape", "Qwen3-8B", *ONE_SET).output
    assert "no division fits: use more GPUs" in said


def test_trained_run_provides_the_training_time(directory: Path) -> None:
    run_dir = directory / "runs" / "mine"
    store = write_store(run_dir / "refrain.duckdb")
    assert trained_token_s(store) is None
    rows = from_store(store).step(1)
    tokens = int((rows.column("prompt_tokens") + rows.column("response_tokens")).sum())
    with Store(store) as opened:
        for step in (1, 2):
            report = make_report(step)
            timing = report.timing_s | {"train": 3.0}
            opened.add_step(report.model_copy(update={"timing_s": timing}))
    assert trained_token_s(store) == pytest.approx(3.0 / tokens)
    config = {"model": {"path": "m"}, "data": {"train": ["t"]}, "trainer": {"num_processes": 2}}
    write_config(run_dir, TrainConfig.model_validate(config))
    write_profile(directory / "p.json")
    args = ("mine", "--divide", "3", *FORMULA, *ONE_SET)
    assert "training: formula" in succeed(*args).output
    by_run = (*args, "--profile", "p.json")
    assert "profile of" in succeed(*by_run).output
    assert "training: measured in the run" in succeed(*by_run).output
    # Two processes took 3 s, so three take 2 s. The weight sync adds about 10 ms.
    shared, *_ = rows_of(*by_run)
    assert shared["train_s"] == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((T, "--divide", "4"), "--divide needs --hardware and --shape, for memory and hand-over"),
        ((T, "--divide", "4", "--profile", "p.json"), "--divide needs --hardware and --shape"),
        ((T, *DIVIDED, "--policies", "histopipe"), "--divide tries its own pipelined modes"),
        ((*DIVIDED, "--paper", "pat"), "--divide needs a TRACE: give one"),
        (DIVIDED, "--divide needs a TRACE"),
        ((T, *DIVIDED, "--engines", "2"), "--engines does not work with --divide"),
        ((T, *DIVIDED, "--num-gpus", "2"), "--num-gpus does not work with --divide"),
        ((T, "--divide", "2", "--tp", "4", *FORMULA), "2 GPUs are too few for an engine of TP 4"),
    ],
)
def test_invalid_divisions_are_refused(args: tuple[str, ...], message: str) -> None:
    result = refrain(*args)
    assert result.exit_code == 2, result.output
    assert message in result.output
