"""The `refrain` command. Heavy packages are imported by the command that needs them."""

from pathlib import Path
from typing import Any

import click

from flows import cli_inputs, options
from flows.command import run_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="refrain")
def main() -> None:
    """LLM post-training with reinforcement learning, with rollouts that earlier ones speed up."""


@main.command()
@click.argument("config_file", metavar="[CONFIG]", required=False)
@click.argument("overrides", nargs=-1)
@click.option(
    "--resume", metavar="RUN", help="Go on with a run: its directory, or its name under runs/."
)
@click.option(
    "--new-store",
    is_flag=True,
    help="With --resume: go on with an empty store, or with an older copy, as the run's is gone or "
    "damaged. What is left of it is renamed.",
)
@click.option("--overwrite", is_flag=True, help="Delete an earlier run of the same name first.")
@click.option(
    "--check",
    is_flag=True,
    help="Validate config, data, model and scorer, print what memory each part takes, then stop.",
)
@click.option(
    "--gpus",
    metavar="MACHINE",
    help="With --check: another machine than this one, as in 8xH100-80GB, or 2x8xH100-80GB.",
)
def train(**options: Any) -> None:
    """Train as CONFIG says, with dotted overrides. A run that is resumed takes those that decide
    neither on tokens nor on the order of data.

    \b
    refrain train infra/demo/train.yaml
    refrain train my.yaml rollout.num_engines=4 trainer.learning_rate=2e-6
    refrain train my.yaml --check --gpus 8xH100-80GB
    refrain train --resume runs/demo
    refrain train --resume runs/demo rollout.num_engines=1
    """
    from flows.launch import launch_train

    run_command(lambda: launch_train(**options))


@main.command()
@options.runs_dir
def runs(runs_dir: Path) -> None:
    """List all runs: how far they are, their last reward, and which can be resumed."""
    from flows.runs import launch_runs

    run_command(lambda: launch_runs(runs_dir))


@main.command()
@click.argument("run")
@options.runs_dir
@click.option("--follow", "-f", is_flag=True, help="Watch it until it ends.")
@click.option("--all", "show_all", is_flag=True, help="All steps, not the last 20 alone.")
def show(run: str, runs_dir: Path, follow: bool, show_all: bool) -> None:
    """Show RUN, a run's name or directory: its steps, its reward curve, where its files are.

    `idle` is the share of the engines' time since the step before in which they had nothing to do;
    `accepted` the share of draft tokens that were right, `a pass` the tokens of one verification.
    """
    from flows.runs import launch_show

    run_command(lambda: launch_show(run, runs_dir, follow, show_all))


@main.command()
@click.argument("run")
@click.argument("query")
@options.runs_dir
@click.option(
    "--timeout",
    "timeout_s",
    type=options.SECONDS,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
)
@click.option("--csv", "csv_file", metavar="FILE", help="All rows; - for standard output.")
def sql(**options: Any) -> None:
    """Ask RUN's store in SQL (DuckDB's), while it trains or afterwards; nothing is written.

    Tables: rollouts, rewards, plans, outcomes, steps. Views: step_metrics (step, epoch, name,
    value), acceptance (by step, engine and drafter), lengths (by step and prompt).

    \b
    refrain sql demo "SELECT step, max(max_tokens) FROM lengths GROUP BY step ORDER BY step"
    refrain sql demo "DESCRIBE rollouts"
    """
    from flows.sql import launch_sql

    run_command(lambda: launch_sql(**options))


@main.command()
@click.argument("run")
@options.runs_dir
@click.option(
    "--timeout",
    "timeout_s",
    type=options.SECONDS,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
)
@click.option("--json", "json_file", metavar="FILE", help="Write it here; - for standard output.")
@click.option("--png", "png_file", metavar="FILE", help="Draw it here.")
def report(**options: Any) -> None:
    """Tell what of RUN's responses returns from epoch to epoch, while it trains or afterwards:
    words that the last epoch had, and the ranks of lengths (RhymeRL, 5.1, 5.4, 6.1 and 6.3).
    """
    from flows.report import launch_report

    run_command(lambda: launch_report(**options))


@main.command()
@click.option("--model", required=True, type=options.DIRECTORY, help="Its directory.")
@click.option("--name", help="Of the profile.  [default: the model's]")
@click.option("--runs-dir", type=options.DIRECTORY, help="[default: runs]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: bfloat16]")
@click.option(
    "--trust-remote-code",
    is_flag=True,
    default=None,
    help="Run Python code that comes with the models.",
)
@click.option(
    "--tp",
    "tp_degrees",
    type=options.Numbers(most=1024),
    metavar="LIST",
    help="TP degrees.  [default: 1]",
)
@click.option(
    "--shards",
    metavar="HARDWARE",
    help="Measure a TP degree by one of its shards, on one GPU; all-reduces by data sheet.",
)
@options.count(
    "--engines",
    "num_engines",
    help="Engines that measure at once: on a CPU, as many as a run has.  [default: 1]",
)
@options.count("--max-batch", help="[default: 256]")
@click.option(
    "--max-context",
    type=options.TOKENS,
    metavar="TOKENS",
    help="[default: the model's, at most 16384]",
)
@click.option(
    "--windows",
    type=options.Numbers(),
    metavar="LIST",
    help="Draft windows; '' leaves drafting out.  [default: 1,2,4,8,16]",
)
@click.option(
    "--draft-model",
    "draft_models",
    type=options.DraftModelPath(),
    multiple=True,
    metavar="NAME=PATH",
    help="A small model that may draft; repeatable.",
)
@options.count("--steps", "decode_steps", help="For a point.  [default: 60]")
@options.count("--passes", help="Over decode and prefill: more for a noisy machine.  [default: 1]")
@options.count("--kv-cache-bytes", type=options.BYTES, help="[default: as a training run's]")
@click.option("--enforce-eager", is_flag=True, default=None, help="As a training run's.")
@options.seed(help="[default: 0]")
@click.option("--overwrite", is_flag=True, help="Measure anew what is there.")
def profile(overwrite: bool, draft_models: tuple[dict[str, str], ...], **values: Any) -> None:
    """Measure a model on this machine once; `refrain simulate` and the policies use the result.

    About 10 minutes on a GPU. What was interrupted goes on where it was.

    \b
    refrain profile --model infra/demo/model --dtype float32 --max-context 384
    """
    from flows.launch import launch_profile

    given = values | {"draft_models": list(draft_models) or None}
    run_command(lambda: launch_profile(given, overwrite))


@main.command()
@click.argument("checkpoint")
@click.argument("data", nargs=-1, metavar="[DATA]... [OVERRIDE]...")
@options.count("--samples", help="A prompt.  [default: as in its run]")
@options.seed(help="[default: as in its run, or 0]")
@click.option(
    "--config",
    metavar="RUN|FILE",
    help="Whose data limits, sampling and reward hold.  [default: the run that it belongs to]",
)
@click.option("--name", help="Of the evaluation.  [default: the checkpoint's and the data's]")
@click.option("--log-to-run", is_flag=True, help="Add the figures to its run in MLflow.")
@click.option("--resume", is_flag=True, help="Go on with one that was stopped.")
@click.option("--overwrite", is_flag=True, help="Delete an earlier one of the same name first.")
@click.option("--json", metavar="FILE", help="Write the figures here; - for standard output.")
@options.runs_dir
def evaluate(
    data: tuple[str, ...], resume: bool, overwrite: bool, json: str | None, **values: Any
) -> None:
    """Evaluate CHECKPOINT on DATA: mean@n, best@n and maj@n by data source.

    CHECKPOINT is a run's checkpoint directory, a run's name (its last checkpoint), or any Hugging
    Face directory. DATA are veRL-style files; without, the run's validation files. A checkpoint
    has the same samples as in its run's validation, and so the same figures, unless the seed or
    the sampling is another. rollout.temperature=0 takes the likeliest token always.

    \b
    refrain evaluate demo
    refrain evaluate runs/demo/checkpoints/global_step_32 test.parquet --samples 8
    refrain evaluate /models/Qwen3-8B test.parquet --config demo rollout.temperature=0.6
    """
    from flows.launch import launch_evaluate, read_evaluate_config

    run_command(
        lambda: launch_evaluate(read_evaluate_config(data, values), resume, overwrite, json)
    )


@main.command()
@options.runs_dir
@options.prefect_port
@options.mlflow_port
def ui(runs_dir: Path, prefect_port: int, mlflow_port: int) -> None:
    """Serve Prefect's UI, a worker and MLflow's UI on this machine until interrupted."""
    from flows.ui import serve

    run_command(lambda: serve(runs_dir, prefect_port, mlflow_port))


@main.command()
@options.runs_dir
@options.prefect_port
@options.mlflow_port
@click.option("--json", "json_file", metavar="FILE", help="Write it here; - for standard output.")
def doctor(**options: Any) -> None:
    """Look at this machine: GPUs, driver, memory, disks, ports, versions, and how to mend what is
    wrong. Seconds; nothing is started. Exit status 1 when there is a problem.
    """
    from flows.doctor import launch_doctor

    run_command(lambda: launch_doctor(**options))


@main.command()
@options.runs_dir
def deploy(runs_dir: Path) -> None:
    """Put the deployments on the server at PREFECT_API_URL, for workers of its pool `refrain`.

    One run at a time in the pool. On one machine `refrain ui` does this and more.
    """
    from flows.deployments import launch_deploy

    run_command(lambda: launch_deploy(runs_dir))


@main.command()
@click.argument("trace", required=False)
@click.option("--paper", metavar="NAME", help="Instead of TRACE: pat, rhymerl or specactor.")
@options.count("--engines", help="Engines of the virtual cluster.")
@options.count("--divide", help="Instead of --engines: GPUs to divide between engines and trainer.")
@options.count("--tp", metavar="T", help="GPUs of one engine.  [default: 1]")
@click.option("--profile", metavar="PATH", help="Measured latency: a profile, or its name.")
@click.option("--hardware", metavar="NAME", help="Latency by formula: the GPU, as in H100.")
@click.option("--shape", metavar="NAME", help="With --hardware: the model, as in Qwen3-8B.")
@click.option(
    "--policies",
    default="even,ranked",
    show_default=True,
    metavar="LIST",
    help="Policy sets: even, ranked or histopipe (as a pipelined run does), drafting with "
    "+DRAFTER:WINDOW (ranked+ngram:4), or from history with +histospec.",
)
@click.option(
    "--acceptance",
    type=options.Finite(0.0, 1.0),
    metavar="P",
    help="Of drafts, where the trace has none.",
)
@click.option("--steps", metavar="LIST", help="Steps to simulate, as in 1-10,20.  [default: all]")
@options.count("--gpus-per-node", help="TP stays inside.  [default: 8]")
@options.count("--num-gpus", help="GPUs there are.  [default: what it takes]")
@options.count("--max-num-seqs", help="Requests decoded at a time.  [default: 256]")
@options.count(
    "--kv-tokens", type=options.TOKENS, help="KV cache of one engine.  [default: as known]"
)
@options.seed(help="Of the traces of --paper.  [default: 0]")
@click.option("-o", "--out", type=options.DIRECTORY, metavar="DIR", help="Where pictures go.")
@click.option("--json", metavar="FILE", help="Write figures and rows here; - for standard output.")
def simulate(**options: Any) -> None:
    """Replay TRACE on virtual engines: what would another cluster or policy have cost?

    TRACE is a Parquet trace, a run's refrain.duckdb, its directory, or its name under runs/. Prints
    step time, throughput and idle share for each policy set, and draws when each engine was busy.
    --paper also simulates what a paper's parts bring, and one controller over all of them: minutes.
    --divide says who should have which GPUs: all in turn, or each its own, one after the other or
    overlapping, and recommends a division.

    \b
    refrain simulate demo --engines 2 --profile mine
    refrain simulate trace.parquet --engines 8 --hardware H100 --shape Qwen3-8B
    refrain simulate demo --divide 8 --hardware H100 --shape Qwen3-8B --policies ranked
    refrain simulate --paper rhymerl --json -
    """
    from flows.simulate import launch_simulate
    from flows.simulate_divided import launch_divided
    from flows.simulate_input import Arguments

    launch = launch_simulate if options["divide"] is None else launch_divided
    run_command(lambda: launch(Arguments(**options)))


@main.command()
@click.argument("run")
@click.argument("file", required=False, type=options.FILE)
@click.option(
    "--trace",
    "events",
    type=options.FILE,
    metavar="FILE.json",
    help="What the engines did when: rollouts, weight syncs, moves. Opens in ui.perfetto.dev and "
    "chrome://tracing.",
)
@click.option(
    "--timeline",
    "page",
    type=(click.IntRange(0, 2**31), options.FILE),
    metavar="STEP FILE.html",
    help="A training step as a page for the browser: GPUs, requests, moves, seconds saved.",
)
@click.option(
    "--token-ids", is_flag=True, help="FILE with the tokens themselves, not their numbers alone."
)
def export(**options: Any) -> None:
    """Write RUN for other tools: its rollouts to FILE, its engines' time to --trace FILE.json, a
    step's timeline to --timeline STEP FILE.html.

    RUN is a run's directory, its refrain.duckdb, or its name under runs/. FILE is Parquet, a row a
    rollout with the columns of schemas/trace.py; `refrain simulate` reads it anywhere.

    \b
    refrain export demo rollouts.parquet
    refrain export demo --trace demo.json
    refrain export demo --timeline 8 step8.html
    """
    from flows.export import launch_export

    run_command(lambda: launch_export(**options))


@main.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--list]",
)
@click.argument("name", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--list", "listed", is_flag=True, help="What each measures and how long it takes.")
def bench(name: str | None, args: tuple[str, ...], listed: bool) -> None:
    """Run the benchmark NAME: a table for people, --json FILE for machines.

    `refrain bench NAME --help` tells its arguments.

    \b
    refrain bench --list
    refrain bench index --json index.json
    refrain bench drafting demo --profile benchmarks/baselines/profile_demo.json
    """
    from flows.bench import launch_bench, list_benches

    run_command(list_benches if listed else lambda: launch_bench(name, args))


main.add_command(cli_inputs.data)
main.add_command(cli_inputs.config)

if __name__ == "__main__":
    main()
