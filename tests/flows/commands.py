"""Run the real `refrain` command, read its output and kill it."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from safetensors.numpy import load_file, save_file

from refrain.flows.signals import SIGNALS
from tests.conftest import DEMO, REPOSITORY

LINE_TIMEOUT_S = 400.0


def write_config(directory: Path, num_prompts: int = 24, **changes: object) -> Path:
    """Write the demo's config at reduced size: two epochs of two steps, with validation. Return its
    path.

    For example, `rollout__num_engines=1` changes a field of a section.
    """
    for split, rows in (("train", num_prompts), ("validation", 8)):
        table: pa.Table = pq.read_table(DEMO / "data" / f"{split}.parquet")
        pq.write_table(table.slice(0, rows), directory / f"{split}.parquet")
    config = yaml.safe_load((DEMO / "train.yaml").read_text())
    config |= {"num_epochs": 2, "prompts_per_step": num_prompts // 2, "validation_samples": 2}
    config["model"]["path"] = str(DEMO / "model")
    config["data"]["train"] = [str(directory / "train.parquet")]
    config["data"]["validation"] = [str(directory / "validation.parquet")]
    config["runs_dir"] = str(directory / "runs")
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            config[section][field] = value
        else:
            config[section] = value
    path = directory / "train.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def with_default_signals() -> None:
    """Reset the signal handlers, as in an interactive shell, even if the parent ignores signals."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


class Command:
    """A running `refrain` command in its own process group. A thread reads its output."""

    def __init__(
        self,
        *args: str | Path,
        environment: Mapping[str, str] | None = None,
        module: str = "refrain.flows.cli",
    ) -> None:
        """Start `module` with `args`. The default environment is this process's, without
        RAY_ADDRESS."""
        if environment is None:
            environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
            env={**environment, "COLUMNS": "200"},
            start_new_session=True,
            preexec_fn=with_default_signals,
        )
        self.lines: list[str] = []
        self._fresh: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for_line(self, text: str) -> str:
        """Return the next line that contains `text`."""
        deadline = time.monotonic() + LINE_TIMEOUT_S
        while True:
            line = self._fresh.get(timeout=max(0.1, deadline - time.monotonic()))
            assert line is not None, f"ended without {text!r}:\n" + "".join(self.lines)
            if text in line:
                return line

    def kill(self) -> None:
        """Send SIGKILL to the driver alone, as Linux does when memory runs out."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def finish(self, timeout_s: float = LINE_TIMEOUT_S) -> str:
        """Wait until the command succeeds, and return its output."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError("".join(self.lines)) from error
        output = "".join(self.lines)
        assert status == 0, output
        return output

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._fresh.put(line)
        self._fresh.put(None)


def altered_model(directory: Path, **values: int | str) -> Path:
    """Copy the demo's model with other values in its config. A larger vocabulary has zero rows."""
    shutil.copytree(DEMO / "model", directory)
    file, weights = directory / "config.json", directory / "model.safetensors"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | values))
    if num_rows := values.get("vocab_size"):
        tensors = load_file(weights)
        for name, tensor in tensors.items():
            if len(tensor) == config["vocab_size"]:
                padding = np.zeros((num_rows, *tensor.shape[1:]), tensor.dtype)
                tensors[name] = np.concatenate([tensor, padding])[:num_rows]
        save_file(tensors, weights, {"format": "pt"})
    return directory
