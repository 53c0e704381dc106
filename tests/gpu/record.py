"""Record figures in `benchmarks/baselines/gpu.json`, one row per machine and figure.

So a part of the suite on one machine keeps the figures of other machines and of other tests. The
format is that of `schemas.bench.BenchReport`, written without pydantic.
"""

import json
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RECORD = Path(__file__).parents[2] / "benchmarks" / "baselines" / "gpu.json"
MACHINE = ("card", "gpus", "driver", "torch", "triton", "vllm")
"""Columns that identify a machine."""
Row = dict[str, Any]


def machine() -> Row:
    """Return the machine and its versions. None: not installed."""
    on_gpu = torch.cuda.is_available()
    return {
        "card": torch.cuda.get_device_name() if on_gpu else "CPU, a rehearsal",
        "gpus": torch.cuda.device_count(),
        "driver": _driver() if on_gpu else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "vllm": _version("vllm"),
    }


def merged(rows: list[Row], where: Row, figures: Mapping[str, float]) -> list[Row]:
    """Return the rows, with this machine's earlier values of these figures replaced."""
    new = [{**where, "figure": name, "value": value} for name, value in figures.items()]
    replaced = {_identity(row) for row in new}
    kept = [row for row in rows if _identity(row) not in replaced]
    return sorted(kept + new, key=lambda row: tuple(map(str, _identity(row))))


def write(path: Path, where: Row, figures: Mapping[str, float]) -> None:
    """Merge figures into the file. The report's `figures` are all of this machine's."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = merged(old, where, figures)
    own = [row for row in rows if all(row[name] == where[name] for name in MACHINE)]
    head = {"name": "gpu", "figures": {row["figure"]: row["value"] for row in own}}
    tail = {"command": "make gpu", "versions": {n: where[n] for n in MACHINE[3:] if where[n]}}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    begin, end = json.dumps(head, indent=1)[:-2], json.dumps(tail, indent=1)[2:]
    path.write_text(f'{begin},\n "rows": [\n{lines}\n ],\n{end}\n')


def _identity(row: Row) -> tuple:
    return tuple(row[name] for name in (*MACHINE, "figure"))


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=False)
    return told.stdout.split("\n")[0].strip() or "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
