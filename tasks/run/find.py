"""Find the directories of runs. It loads no packages, so commands that read a run start at once."""

import os
from pathlib import Path

CONFIG_FILE = "config.json"
STORE_FILE = "refrain.duckdb"


def find_run(name: str, runs_dir: Path, holding: str = CONFIG_FILE) -> Path:
    """Return the directory of the run with this name or path. It must have the file `holding`.
    Otherwise raise ValueError and list the existing runs."""
    for run_dir in (runs_dir / name, Path(name)):
        if (run_dir / holding).is_file():
            return run_dir
    if Path(name).is_dir():
        raise ValueError(f"{name} is not a run's directory: it has no {holding}")
    names = ", ".join(sorted(run_dir.name for run_dir in run_dirs(runs_dir)))
    there = f"known: {names}" if names else "there is none yet; `refrain train` starts one"
    raise ValueError(f"no run {name!r} in {runs_dir}: give a run's name or its directory; {there}")


def run_dirs(runs_dir: Path) -> list[Path]:
    """Return the directories of runs. Empty: `runs_dir` does not exist. Raise OSError when it
    cannot be read."""
    try:
        names = [name for name in os.listdir(runs_dir) if not name.startswith(".")]
    except FileNotFoundError:
        return []
    return [runs_dir / name for name in names if (runs_dir / name / CONFIG_FILE).is_file()]
