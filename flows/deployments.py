"""Deploy `prefect.yaml` to a Prefect server, with filled-in forms, and make the work pool.

The forms take their values from config files, which the command line takes too. So this module
declares no values of its own.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from refrain.engines.paths import check_place
from refrain.flows.auth import GIVEN, refusal
from refrain.flows.config_file import load_config
from refrain.schemas.config import TrainConfig
from refrain.schemas.evaluation import EvaluateConfig
from refrain.schemas.profile import ProfileConfig

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

POOL = "refrain"
DEPLOYMENTS_FILE = Path("prefect.yaml")
_DEMO = Path("infra/demo/train.yaml")
_PRESETS = Path("infra/presets")
_NEW_RUN = "from-ui"
_TIMEOUT_S = 300.0


def launch_deploy(runs_dir: Path) -> None:
    """Deploy to the server at PREFECT_API_URL. Raise ValueError when the variable is not set, or
    when the working directory is not the project's."""
    api = os.environ.get("PREFECT_API_URL")
    if not api:
        raise ValueError("PREFECT_API_URL is not set: set it, for example http://HOST:4200/api")
    check_directory()
    check_place(runs_dir, f"--runs-dir {runs_dir}")
    deploy(api, runs_dir)
    print(f"deployed to {api}; a worker runs them: prefect worker start --pool {POOL} --limit 1")


def check_directory() -> None:
    if not DEPLOYMENTS_FILE.exists():
        raise ValueError(f"no {DEPLOYMENTS_FILE} here: run this in the project's directory")


def deploy(api: str, runs_dir: Path) -> None:
    """Deploy all of `prefect.yaml` in one process, because each process takes seconds to import
    Prefect. Raise RuntimeError when Prefect refuses something, and the errors of `client_of`."""
    with client_of(api) as client:
        _make_pool(client)
        switched = _switched(client)
    forms = _forms(runs_dir)
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


@contextmanager
def client_of(api: str) -> "Generator[SyncPrefectClient]":
    """Yield Prefect's client of the server at `api`, with the key or password of the environment.

    Raise ValueError when the server wants another password, and OSError when it does not answer or
    refuses a request.
    """
    import httpx
    from prefect.client.orchestration import SyncPrefectClient

    key, password = os.environ.get("PREFECT_API_KEY"), os.environ.get(GIVEN)
    try:
        with SyncPrefectClient(api, api_key=key, auth_string=password) as client:
            yield client
    except httpx.HTTPStatusError as error:
        if error.response.status_code == HTTPStatus.UNAUTHORIZED:
            raise refusal(error.request.url) from error
        raise OSError(f"Prefect's server refuses {error.request.url}: {error}") from error
    except httpx.TransportError as error:
        raise OSError(f"Prefect's server at {api} does not answer: {error}") from error


def _make_pool(client: "SyncPrefectClient") -> None:
    """Make the work pool. It runs one flow at a time, because all flows use the same GPUs."""
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists

    try:
        # The worker adds the template of its type.
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=1))
    except ObjectAlreadyExists:
        client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=1))


def _switched(client: "SyncPrefectClient") -> dict[tuple[str, str], bool]:
    """Return which existing schedules are on, by deployment and cron. A user may have switched
    them in the UI."""
    return {
        (deployment.name, cron): schedule.active
        for deployment in client.read_deployments()
        for schedule in deployment.schedules
        if (cron := getattr(schedule.schedule, "cron", None))
    }


def _forms(runs_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the parameters of each deployment."""
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
    # Leave the rest to the defaults of the type and mode, which a user may change in the form.
    values["algorithm"] = {"type": config.algorithm.type}
    return {"config": values, "resume": False}
