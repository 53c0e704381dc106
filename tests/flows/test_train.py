"""Real runs from the command line: one is not interrupted, others are killed at bad moments."""

import contextlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest

from refrain.engines.learn.checkpoint import STATE_FILE
from refrain.engines.store.listener import live_snapshot
from refrain.engines.store.open_database import connect
from refrain.tasks.run.run_dir import STORE_FILE
from refrain.tasks.run.store_query import query_run
from tests.accounting.test_metric_names import described_as
from tests.flows.commands import write_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

NUM_STEPS, PROMPTS_PER_STEP, GROUP_SIZE = 4, 12, 8
DRAWN_PER_STEP = 14
"""Prompts that a step draws with `PIPELINED`."""
DRAWN = "SELECT step, report->>'drawn' FROM steps ORDER BY step"
PIPELINED = {
    "staleness": 1,
    "rollout__oversample": 0.1,
}


def query(run_dir: Path, sql: str) -> list[tuple]:
    with duckdb.connect(str(run_dir / "refrain.duckdb"), read_only=True) as con:
        return con.execute(sql).fetchall()


def processes(run_dir: Path) -> list[psutil.Process]:
    """Return the run's processes on this machine."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("REFRAIN_RUN_DIR") == str(run_dir.absolute()):
                found.append(process)
    return found


@contextlib.contextmanager
def slowed(run_dir: Path) -> Iterator[None]:
    """Let the run's engines work a fifth of the time. On a fast machine, the rollout would end
    before a test can disturb it."""
    cores = [p for p in processes(run_dir) if "VLLM::EngineCore" in " ".join(p.cmdline())]
    assert cores
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            send(signal.SIGSTOP)
            time.sleep(0.02)
            send(signal.SIGCONT)
            time.sleep(0.005)

    def send(number: int) -> None:
        for core in cores:
            with contextlib.suppress(psutil.Error):
                core.send_signal(number)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def assert_complete_in_a_pipeline(run_dir: Path) -> None:
    """Assert that each drawn sample is there once, scored, and at most one policy version behind.
    Deferred samples belong to the next step, and their first tokens may be one version older."""
    samples = query(
        run_dir,
        "SELECT origin_step, count(*), count(DISTINCT (prompt_key, "
        "CASE WHEN sample_index < 0 THEN -1 - sample_index ELSE sample_index END)) "
        "FROM rollouts WHERE split = 'train' GROUP BY ALL ORDER BY ALL",
    )
    drawn = [DRAWN_PER_STEP, 2 * PROMPTS_PER_STEP - DRAWN_PER_STEP] * 2
    sizes = [prompts * GROUP_SIZE for prompts in drawn]
    assert samples == [(n, size, size) for n, size in enumerate(sizes, 1)]
    versions = query(
        run_dir,
        "SELECT step, origin_step, min(policy_version), max(last_policy_version) "
        "FROM rollouts WHERE split = 'train' GROUP BY ALL",
    )
    for step, origin, oldest, newest in versions:
        assert origin in (step - 1, step)
        assert oldest >= max(0, origin - 2)
        assert newest <= step - 1
    assert query(run_dir, DRAWN) == [(step, "true") for step in (1, 2, 3, 4)]
    assert query(
        run_dir,
        "SELECT count(*) FROM rollouts ANTI JOIN rewards "
        "USING (split, step, prompt_key, sample_index)",
    ) == [(0,)]


def assert_complete(run_dir: Path) -> None:
    """Assert that each (step, prompt, sample) is there once and scored, and that all steps are."""
    per_step = query(
        run_dir,
        "SELECT step, count(*), count(DISTINCT (prompt_key, sample_index)), min(policy_version), "
        "max(policy_version) FROM rollouts WHERE split = 'train' GROUP BY step ORDER BY step",
    )
    size = PROMPTS_PER_STEP * GROUP_SIZE
    assert per_step == [(n, size, size, n - 1, n - 1) for n in range(1, NUM_STEPS + 1)]
    assert query(run_dir, "SELECT step FROM steps ORDER BY step") == [
        (n,) for n in range(1, NUM_STEPS + 1)
    ]
    assert query(
        run_dir,
        "SELECT count(*) FROM rollouts ANTI JOIN rewards "
        "USING (split, step, prompt_key, sample_index)",
    ) == [(0,)]
    epochs = query(
        run_dir,
        "SELECT epoch, count(DISTINCT prompt_key) FROM rollouts WHERE split = 'train' "
        "GROUP BY epoch ORDER BY epoch",
    )
    assert epochs == [(0, 2 * PROMPTS_PER_STEP), (1, 2 * PROMPTS_PER_STEP)]


def spoil_histories(run_dir: Path) -> None:
    """Delete two index files and damage two more. The second epoch drafts from them."""
    files = sorted((run_dir / "history").glob("*.index"))
    assert len(files) >= 2 * PROMPTS_PER_STEP
    for file in files[:2]:
        file.unlink()
    for file in files[2:4]:
        file.write_bytes(file.read_bytes()[:-1] + b"\x7f")


def wait_for_copy(copies: Path, step: int) -> None:
    """Wait until a copy is complete. The run copies in the background, and the test deletes the
    originals next."""
    deadline = time.monotonic() + 60.0
    while not list(copies.rglob(f"global_step_{step}/{STATE_FILE}")):
        assert time.monotonic() < deadline, list(copies.rglob("*"))
        time.sleep(0.05)


def forget_lengths(run_dir: Path) -> None:
    """Make all responses of the first epoch short, and delete those of the second. Nearly every
    response then outgrows its forecast."""
    # The store's process lives some seconds longer than its killed driver.
    with connect(run_dir / STORE_FILE, read_only=False, lock_timeout_s=60.0) as con:
        con.execute("UPDATE rollouts SET response_tokens = 3 WHERE split = 'train' AND step <= 2")
        con.execute("DELETE FROM rollouts WHERE split = 'train' AND step > 2")
        # Step 4 may have been planned with the true lengths.
        con.execute("DELETE FROM plans WHERE split = 'train' AND step > 2")


def assert_deferred_add_up(run_dir: Path) -> None:
    """Assert that the next step trained on a step's deferred samples. Whether a move pays depends
    on the machine's speed, so their number may be 0 (`tests/inference` forces moves)."""
    reports = [json.loads(report) for (report,) in query(run_dir, "SELECT report FROM steps")]
    deferred = sum(report["metrics"]["rollout/num_deferred"] for report in reports)
    carried = query(run_dir, "SELECT count(*) FROM rollouts WHERE origin_step < step")
    assert [(deferred,)] == carried
    assert deferred <= 2 * (DRAWN_PER_STEP - PROMPTS_PER_STEP) * GROUP_SIZE


def kill_history_worker(run_dir: Path) -> None:
    (worker,) = [p for p in processes(run_dir) if "HistoryWorker" in " ".join(p.cmdline())]
    worker.kill()


def assert_drafted(run_dir: Path) -> None:
    """Assert that prompts of the second epoch had accepted drafts. Their number depends on the
    machine: how soon the killed worker is back, and how much is worth verifying in engines whose
    steps take 2 or 20 ms at random (`slowed`). `test_mlflow_has_the_run` holds engines to more."""
    drafted = (
        "SELECT step, prompt_key, sum(num_accepted_tokens) / sum(response_tokens) AS share "
        "FROM rollouts WHERE split = 'train' AND epoch = 1 GROUP BY ALL ORDER BY ALL"
    )
    shares = query(run_dir, drafted)
    assert len(shares) == 2 * PROMPTS_PER_STEP
    assert sum(share > 0.2 for *_, share in shares) >= PROMPTS_PER_STEP / 4, shares


def test_a_run_leaves_what_it_promises(whole_run: Path) -> None:
    assert_complete(whole_run)
    summary = json.loads((whole_run / "summary.json").read_text())
    assert summary["steps"] == NUM_STEPS
    assert summary["num_rollouts"] == NUM_STEPS * PROMPTS_PER_STEP * GROUP_SIZE
    assert 0.1 < summary["reward_first"] < 0.9
    assert 0.1 < summary["reward_last"] <= 1.0
    assert 0.0 < summary["validation_first"] < 1.0
    assert 0.0 < summary["validation_last"] <= 1.0
    assert summary["tokens_per_second"] > 0
    assert summary["wall_s"] > 0
    assert summary["failures"] == {}
    assert {"sync", "rollout", "reward", "train", "step"} <= summary["timing_s"].keys()


def test_the_next_process_would_know_what_its_engines_learnt(whole_run: Path) -> None:
    learnt = query(whole_run, "SELECT step, engine, state FROM learnt ORDER BY ALL")
    assert [row[:2] for row in learnt] == [(step, engine) for step in range(5) for engine in (0, 1)]
    first, last = (json.loads(learnt[i][2]) for i in (0, -1))
    assert sum(last["history"]["acceptance"]["num_tried"]) > sum(
        first["history"]["acceptance"]["num_tried"]
    )
    assert last["step_times"]["coefficients"] != first["step_times"]["coefficients"]
    assert query(whole_run, "SELECT count(*) FROM prompts") == [(32,)]
    (reported,) = duckdb.sql(
        f"SELECT count(*) FROM '{whole_run}/refrain.archive/*/rollouts*.parquet'"
    ).fetchall()
    assert reported == (NUM_STEPS * PROMPTS_PER_STEP * GROUP_SIZE,)


def test_mlflow_has_the_run(whole_run: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{whole_run.parent}/mlflow.db")
    run_id = json.loads((whole_run / "mlflow.json").read_text())["run_id"]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    for name in ("critic/score/mean", "response_length/mean", "timing_s/gen"):
        assert [m.step for m in client.get_metric_history(run_id, name)] == [1, 2, 3, 4]
    drafting = client.get_metric_history(run_id, "rollout/speculation_rate")
    assert {3, 4} <= {m.step for m in drafting if m.value > 0.2}
    busy = client.get_metric_history(run_id, "system/cpu_utilization_percentage")
    assert max(metric.value for metric in busy) > 10.0
    assert {m.step for m in client.get_metric_history(run_id, "validation/reward")} == {0, 4}
    artifacts = {
        a.path for folder in ("plans", "rollouts") for a in client.list_artifacts(run_id, folder)
    }
    assert {"plans/train-00001.json", "rollouts/train-00004.json"} <= artifacts
    assert float(run.data.params["trainer.learning_rate"]) == 2e-4
    assert run.data.metrics["summary/steps"] == NUM_STEPS
    described = described_as(run.data.metrics)
    assert [name for name, found in described.items() if found is None] == []
    assert {given.dataset.name for given in run.inputs.dataset_inputs} == {"train", "validation"}
    assert run.data.tags["refrain.prefect_run"]
    models = {m.name: m for m in client.search_logged_models([run.info.experiment_id])}
    model = models[f"step-{NUM_STEPS}"]
    assert {metric.key for metric in model.metrics} >= {"validation/reward"}
    assert Path(model.tags["refrain.path"]).is_dir()


def test_the_last_checkpoint_is_a_hugging_face_model(whole_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = whole_run / "checkpoints" / f"global_step_{NUM_STEPS}" / "model"
    assert AutoModelForCausalLM.from_pretrained(model_dir).config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(model_dir).chat_template


@pytest.mark.slow
def test_run_resumes_with_fewer_engines(refrain: Any, whole_run: Path, tmp_path: Path) -> None:
    """Kill a run in a rollout. Resume it with one engine less, another timeout, less memory and one
    epoch more. All its tokens must equal those of the uninterrupted run."""
    command = refrain("train", write_config(tmp_path, num_epochs=1))
    command.wait_for_line("train step 2: rolling out")
    command.kill()
    run_dir = tmp_path / "runs" / "demo"
    changes = ("rollout.num_engines=1", "rollout.stall_timeout_s=500", "num_epochs=2")
    command = refrain("train", "--resume", run_dir, *changes, "rollout.kv_cache_bytes=200000000")
    command.wait_for_line("resumed with rollout.num_engines: 2 -> 1")
    command.finish()
    assert_complete(run_dir)
    tokens = (
        "SELECT split, step, prompt_key, sample_index, response_token_ids, finish_reason "
        "FROM rollouts ORDER BY ALL"
    )
    assert query(run_dir, tokens) == query(whole_run, tokens)
    assert len((run_dir / "changes.jsonl").read_text().splitlines()) == 4


def test_run_killed_anywhere_resumes(refrain: Any, whole_run: Path, tmp_path: Path) -> None:
    """Kill a pipelined run in a rollout, and then in training between two epochs. Delete its
    checkpoints, so that it must resume from their copies. It must end with complete data, and the
    samples of step 1 must equal those of the uninterrupted run."""
    url = (tmp_path / "copies").as_uri()
    config = write_config(tmp_path, **PIPELINED, trainer__checkpoint_url=url)
    run_dir = tmp_path / "runs" / "demo"

    command = refrain("train", config)
    command.wait_for_line("train step 1: rolling out")
    command.kill()

    command = refrain("train", "--resume", run_dir)
    command.wait_for_line("step 2: saving")
    command.wait_for_line("step 3: training")
    wait_for_copy(tmp_path / "copies", step=2)
    command.kill()

    shutil.rmtree(run_dir / "checkpoints")
    for newer in (tmp_path / "copies").rglob("global_step_[3-9]"):
        shutil.rmtree(newer)
    spoil_histories(run_dir)
    forget_lengths(run_dir)
    command = refrain("train", "--resume", run_dir)
    command.wait_for_line("train step 3: rolling out")
    with slowed(run_dir):
        live = query_run(run_dir, "SELECT DISTINCT step FROM rollouts WHERE step < 3", 20.0)
        assert sorted(live["step"].to_pylist()) == [0, 1, 2]
        kill_history_worker(run_dir)
        command.finish()
    assert_complete_in_a_pipeline(run_dir)
    assert_deferred_add_up(run_dir)
    assert_drafted(run_dir)
    assert processes(run_dir) == []
    with live_snapshot(run_dir, 1.0) as snapshot:
        assert snapshot is None
    first_step = (
        "SELECT prompt_key, sample_index, response_token_ids, finish_reason FROM rollouts "
        "WHERE split = 'train' AND step = 1"
    )
    of_whole_run = {row[:2]: row for row in query(whole_run, first_step)}
    here = {row[:2]: row for row in query(run_dir, first_step)}
    assert of_whole_run.items() <= here.items()
    assert (run_dir / "summary.json").exists()
