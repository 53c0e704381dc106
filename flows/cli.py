"""The `refrain` command. Heavy packages are imported by the command that needs them."""

import sys
from collections.abc import Callable
from pathlib import Path

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="refrain")
def main() -> None:
    """LLM post-training with reinforcement learning, with rollouts that earlier ones speed up."""


@main.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--resume", metavar="RUN", help="Go on with a run: its directory, or its name under runs/."
)
@click.option("--overwrite", is_flag=True, help="Delete an earlier run of the same name first.")
@click.option("--check", is_flag=True, help="Validate config, data, model and scorer, then stop.")
def train(
    config: Path | None,
    overrides: tuple[str, ...],
    resume: str | None,
    overwrite: bool,
    check: bool,
) -> None:
    """Train as CONFIG says, with dotted overrides.

    \b
    refrain train infra/demo/train.yaml
    refrain train my.yaml rollout.num_engines=4 trainer.learning_rate=2e-6
    refrain train --resume runs/demo
    """
    from flows.launch import launch_train

    _run(lambda: launch_train(config, overrides, resume, overwrite, check))


@main.command()
@click.option(
    "--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True
)
@click.option("--prefect-port", default=4200, show_default=True)
@click.option("--mlflow-port", default=5000, show_default=True)
def ui(runs_dir: Path, prefect_port: int, mlflow_port: int) -> None:
    """Serve Prefect's UI, a worker and MLflow's UI on this machine until interrupted."""
    from flows.ui import serve

    _run(lambda: serve(runs_dir, prefect_port, mlflow_port))


def _run(command: Callable[[], None]) -> None:
    try:
        command()
    except (ValueError, RuntimeError) as error:
        click.secho(f"error: {error}", fg="red", err=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except KeyboardInterrupt:
        click.secho("interrupted; go on with --resume", fg="yellow", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
