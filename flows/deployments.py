"""The deployments of `prefect.yaml` on a server, with forms filled in, and the pool they run in.

What a form is filled in with comes from a config file that a terminal takes too, so no value is
declared here.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml

from flows.auth import auth_header, refusal
from flows.config_file import load_config
from schemas.config import TrainConfig
from schemas.evaluation import EvaluateConfig
from schemas.profile import ProfileConfig

POOL = "refrain"
DEPLOYMENTS_FILE = Path("prefect.yaml")
_DEMO = Path("infra/demo/train.yaml")
_PRESETS = Path("infra/presets")
_NEW_RUN = "from-ui"
_TIMEOUT_S = 300.0
_BUSY_S = 60.0
"""Longest time for the server to get over its own load."""


def launch_deploy(runs_dir: Path) -> None:
    """Raises ValueError when no server is named, or this is not the project's directory."""
    api = os.environ.get("PREFECT_API_URL")
    if not api:
        raise ValueError("PREFECT_API_URL names no server: set it, as in http://HOST:4200/api")
    check_directory()
    deploy(api, runs_dir)
    print(f"deployed to {api}; a worker runs them: prefect worker start --pool {POOL} --limit 1")


def check_directory() -> None:
    if not DEPLOYMENTS_FILE.exists():
        raise ValueError(f"no {DEPLOYMENTS_FILE} here: run this in the project's directory")


def deploy(api: str, runs_dir: Path) -> None:
    """Put up all of `prefect.yaml`, in one process: each takes seconds to import Prefect. Raises
    RuntimeError when Prefect refuses something."""
    _make_pool(api)
    forms = _forms(runs_dir)
    switched = _switched(api)
    described = yaml.safe_load(DEPLOYMENTS_FILE.read_text())
    for deployment in described["deployments"]:
        deployment["parameters"] = forms[deployment["name"]]
        for schedule in deployment.get("schedules", ()):
            key = (deployment["name"], schedule["cron"])
            schedule["active"] = switched.get(key, schedule["active"])
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as filled_in:
        yaml.safe_dump(described, filled_in, sort_keys=False)
        filled_in.flush()
        command = prefect_command("--no-prompt", "deploy", "--all")
        command += ["--prefect-file", filled_in.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"prefect deploy failed:\n{done.stdout}{done.stderr}")


def prefect_command(*args: str) -> list[str]:
    return [sys.executable, "-m", "prefect", *args]


def send(method: str, url: str, body: dict[str, Any]) -> Any:
    """The decoded answer, if any. Raises OSError when the server does not answer or refuses,
    ValueError when it wants another password."""
    headers = {"Content-Type": "application/json", **auth_header()}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30.0) as answer:
                text = answer.read()
                return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.UNAUTHORIZED:
                raise refusal(url) from error
            # Its SQLite file was locked.
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _make_pool(api: str) -> None:
    """Make the work pool: all in it take the same GPUs, so one run at a time; others wait."""
    # The worker adds the template of its type.
    pool = {"name": POOL, "type": "process", "concurrency_limit": 1}
    try:
        send("POST", f"{api}/work_pools/", pool)
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.CONFLICT:
            raise
        send("PATCH", f"{api}/work_pools/{POOL}", {"concurrency_limit": 1})


def _switched(api: str) -> dict[tuple[str, str], bool]:
    """Schedules that are there, by deployment and cron: on or off, as a person has left them."""
    return {
        (deployment["name"], schedule["schedule"]["cron"]): schedule["active"]
        for deployment in send("POST", f"{api}/deployments/filter", {})
        for schedule in deployment["schedules"]
        if "cron" in schedule["schedule"]
    }


def _forms(runs_dir: Path) -> dict[str, dict[str, Any]]:
    """Parameters by deployment."""
    demo = load_config(_DEMO)
    profile = ProfileConfig(
        model=demo.model.path,
        dtype=demo.model.dtype,
        runs_dir=runs_dir,
        name=_NEW_RUN,
        max_context=demo.max_model_len,
    )
    evaluation = EvaluateConfig(checkpoint=_NEW_RUN, runs_dir=runs_dir)
    return {
        "train": _train_form(demo.model_copy(update={"name": _NEW_RUN}), runs_dir),
        "train-sync": _train_form(load_config(_PRESETS / "sync.yaml"), runs_dir),
        "train-pipelined": _train_form(load_config(_PRESETS / "pipelined.yaml"), runs_dir),
        "profile": {"config": profile.model_dump(mode="json"), "overwrite": False},
        "evaluate": {
            "config": evaluation.model_dump(mode="json"),
            "resume": False,
            "overwrite": False,
        },
    }


def _train_form(config: TrainConfig, runs_dir: Path) -> dict[str, Any]:
    values = config.model_copy(update={"runs_dir": runs_dir}).model_dump(mode="json")
    # The rest of it is what its type and the mode pick, also when they are changed.
    values["algorithm"] = {"type": config.algorithm.type}
    return {"config": values, "resume": False}
