"""Start flows from the terminal. They use an embedded Prefect, unless PREFECT_API_URL is set."""

import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from refrain.engines.user_files import validated
from refrain.flows.auth import refusal
from refrain.flows.cleaner import Cleaner
from refrain.flows.config_file import load_config, override, read_values
from refrain.flows.environment import set_services, use_embedded_services
from refrain.flows.output_file import JSON, check_output, write_output
from refrain.flows.own_server import own_server
from refrain.flows.signals import WhileRead, run_interruptibly
from refrain.schemas.config import TrainConfig
from refrain.schemas.evaluation import EvaluateConfig
from refrain.schemas.profile import ProfileConfig
from refrain.tasks.run.run_dir import (
    CONFIG_FILE,
    check_deletable,
    check_run_dir,
    mark_processes,
    read_config,
    refuse_live,
)

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun


def launch_train(
    config_file: Path | str | None,
    overrides: Sequence[str],
    resume: str | None,
    overwrite: bool,
    check: bool,
    gpus: str | None = None,
    new_store: bool = False,
) -> None:
    """Plan the run, then train. Raise ValueError for bad input before anything starts."""
    from refrain.flows.prepare import make_way, print_plan, training_plan

    if gpus and not check:
        raise ValueError("--gpus works with --check only: a run uses the GPUs of this machine")
    plan = training_plan(
        _config(config_file, overrides, resume),
        resume is not None,
        overwrite=overwrite,
        new_store=new_store,
        gpus=gpus,
    )
    if check:
        print_plan(plan)
        return
    make_way(plan)
    from refrain.engines.reports.progress import print_summary
    from refrain.flows.train import train

    config, run_dirs = plan.config, [plan.config.run_dir]
    print_summary(
        _carry_out(train, config, plan.resume, run_dirs=run_dirs, mlflow_dir=config.runs_dir)
    )
    print(f"look at it: refrain show {config.run_dir}")


def launch_profile(values: Mapping[str, Any], overwrite: bool) -> None:
    """Validate the options, then measure. Raise ValueError before anything starts."""
    given = {name: value for name, value in values.items() if value is not None}
    config = validated(given, "the command line", ProfileConfig)
    set_services(config.runs_dir)
    from refrain.tasks.profile_inputs import beside, read_profile_inputs

    read_profile_inputs(config)
    if overwrite:
        check_deletable(config.run_dir, ProfileConfig)
    else:
        check_run_dir(config, resume=(config.run_dir / CONFIG_FILE).exists())
    refuse_live(config.run_dir)
    use_embedded_services(config.runs_dir)
    from refrain.engines.reports.profile import print_profile
    from refrain.flows.profiling import profile

    run_dirs = [config.run_dir, beside(config).run_dir]
    report = _carry_out(profile, config, overwrite, run_dirs=run_dirs, mlflow_dir=config.runs_dir)
    print_profile(report)


def read_evaluate_config(data: Sequence[str], values: Mapping[str, Any]) -> EvaluateConfig:
    """Return the config of an evaluation. `data` has files and overrides in any order. Raise
    ValueError for bad values."""
    overrides = [given for given in data if "=" in given and not Path(given).exists()]
    given = {
        **{name: value for name, value in values.items() if value is not None},
        "data": [path for path in data if path not in overrides],
        "overrides": overrides,
    }
    return validated(given, "the command line", EvaluateConfig)


def launch_evaluate(
    config: EvaluateConfig, resume: bool, overwrite: bool, json_file: str | None
) -> None:
    """Plan the evaluation, then evaluate. Raise ValueError before anything starts."""
    check_output(json_file, JSON, "--json")
    from refrain.flows.prepare import evaluation_plan

    _, plan = evaluation_plan(config, resume, overwrite=overwrite)
    use_embedded_services(config.runs_dir)
    from refrain.engines.reports.runs import print_evaluation
    from refrain.flows.evaluate import evaluate

    run_dirs = [plan.config.run_dir]
    report = _carry_out(
        evaluate, config, resume, overwrite, run_dirs=run_dirs, mlflow_dir=config.runs_dir
    )
    print_evaluation(report, Console(stderr=json_file == "-", highlight=False, markup=False))
    if json_file:
        write_output(json_file, report.model_dump_json(indent=2) + "\n")


def _carry_out(
    flow: "Flow[..., Any]", *args: Any, run_dirs: Sequence[Path], mlflow_dir: Path
) -> Any:
    """Run a flow that works in these directories, with a cleaner beside it. Return its result."""
    from refrain.flows.own_server import api_url

    mark_processes(run_dirs[0])
    sys.stdout = WhileRead(sys.stdout)
    cleaner = Cleaner(run_dirs, mlflow_dir)

    def tell(flow: object, flow_run: "FlowRun", state: object) -> None:
        del flow, state
        cleaner.tell(flow_run=str(flow_run.id), api=api_url())

    return _result(flow.with_options(on_running=[tell])(*args))


def _result(flow: Coroutine[Any, Any, Any]) -> Any:
    """Run a flow and return its result. Raise the errors of `_answered`."""
    # A signal may come before the flow has begun: then close its coroutine.
    with closing(flow):
        return _answered(flow)


def _answered(flow: Coroutine[Any, Any, Any]) -> Any:
    """Run a flow and return its result. Raise ValueError when Prefect's server wants another
    password, and RuntimeError when the server does not answer any more."""
    import httpx
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        with own_server():
            return run_interruptibly(flow)
    except httpx.TransportError as error:
        raise RuntimeError(
            f"Prefect's server does not answer any more ({error}): it died, or the machine is "
            "too busy. Continue with --resume. Restart the server first if you set PREFECT_API_URL"
        ) from error
    except PrefectHTTPStatusError as error:
        if error.response.status_code != HTTPStatus.UNAUTHORIZED:
            raise
        raise refusal(error.request.url) from error


def _config(
    config_file: Path | str | None, overrides: Sequence[str], resume: str | None
) -> TrainConfig:
    if resume is None:
        if config_file is None:
            raise ValueError("give a config file, or a run to --resume")
        return load_config(Path(config_file), overrides)
    if config_file is not None and "=" in str(config_file) and not Path(config_file).exists():
        config_file, overrides = None, [str(config_file), *overrides]
    if config_file is None:
        runs_dir = read_values(None, overrides).get("runs_dir", "runs")
        recorded = read_config(_run_dir(resume, Path(str(runs_dir))))
        return override(recorded, overrides) if overrides else recorded
    config = load_config(Path(config_file), overrides)
    run_dir = _run_dir(resume, config.runs_dir)
    return config.model_copy(update={"runs_dir": run_dir.parent, "name": run_dir.name})


def _run_dir(resume: str, runs_dir: Path) -> Path:
    """Return the directory of a run, which is given by its directory or its name."""
    return Path(resume) if os.sep in resume or Path(resume).exists() else runs_dir / resume
