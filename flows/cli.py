"""The `refrain` command. Each subcommand imports the heavy packages that it needs."""

from pathlib import Path
from typing import Any

import click

from refrain.flows import cli_inputs, cli_records, options
from refrain.flows.command import run_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="refrain")
def main() -> None:
    """Train language models with reinforcement learning. Earlier rollouts speed up later ones."""


@main.command()
@click.argument("config_file", metavar="[CONFIG]", required=False)
@click.argument("overrides", nargs=-1)
@click.option(
    "--resume", metavar="RUN", help="Resume a run: its directory, or its name under runs/."
)
@click.option(
    "--new-store",
    is_flag=True,
    help="With --resume, when the run's store is missing or damaged: use an older copy that you "
    "put there, or an empty store. A damaged store is renamed.",
)
@click.option("--overwrite", is_flag=True, help="Delete an earlier run of the same name first.")
@click.option(
    "--check",
    is_flag=True,
    help="Validate config, data, model and scorer, print the memory of each part, then stop.",
)
@click.option(
    "--gpus",
    metavar="MACHINE",
    help="With --check: plan for another machine, for example 8xH100-80GB or 2x8xH100-80GB.",
)
def train(**options: Any) -> None:
    """Train with the settings in CONFIG and dotted overrides. When you resume a run, you can only
    override settings that change neither the tokens nor the order of the data.

    \b
    refrain train infra/demo/train.yaml
    refrain train my.yaml rollout.num_engines=4 trainer.learning_rate=2e-6
    refrain train my.yaml --check --gpus 8xH100-80GB
    refrain train --resume runs/demo
    refrain train --resume runs/demo rollout.num_engines=1
    """
    from refrain.flows.launch import launch_train

    run_command(lambda: launch_train(**options))


@main.command()
@options.runs_dir
def runs(runs_dir: Path) -> None:
    """List all runs: their progress, their last reward, and whether you can resume them."""
    from refrain.flows.runs import launch_runs

    run_command(lambda: launch_runs(runs_dir))


@main.command()
@click.argument("run")
@options.runs_dir
@click.option("--follow", "-f", is_flag=True, help="Watch the run until it ends.")
@click.option("--all", "show_all", is_flag=True, help="Show all steps, not only the last 20.")
def show(run: str, runs_dir: Path, follow: bool, show_all: bool) -> None:
    """Show the steps, the reward curve and the files of RUN (a run's name or directory).

    `idle`: the share of time since the step before in which the engines had nothing to do.
    `accepted`: the share of draft tokens that were accepted. `a pass`: tokens per verification.
    """
    from refrain.flows.runs import launch_show

    run_command(lambda: launch_show(run, runs_dir, follow, show_all))


@main.command()
@click.option("--model", required=True, type=options.DIRECTORY, help="The model's directory.")
@click.option("--name", help="The profile's name.  [default: the model's]")
@click.option("--runs-dir", type=options.DIRECTORY, help="[default: runs]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: bfloat16]")
@click.option(
    "--trust-remote-code",
    is_flag=True,
    default=None,
    help="Run the Python code in the models' directories.",
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
    help="Measure one shard of each TP degree on one GPU. All-reduce times are computed from the "
    "data sheet of HARDWARE.",
)
@options.count(
    "--engines",
    "num_engines",
    help="Engines that measure at once. On a CPU, give as many as a run has.  [default: 1]",
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
    help="Draft windows; '' to measure no drafting.  [default: 1,2,4,8,16]",
)
@click.option(
    "--draft-model",
    "draft_models",
    type=options.DraftModelPath(),
    multiple=True,
    metavar="NAME=PATH",
    help="A draft model to measure; repeatable.",
)
@options.count("--steps", "decode_steps", help="Decode steps per point.  [default: 60]")
@options.count("--passes", help="Passes over decode and prefill; more if noisy.  [default: 1]")
@options.count("--kv-cache-bytes", type=options.BYTES, help="[default: as in a training run]")
@click.option("--enforce-eager", is_flag=True, default=None, help="As in a training run.")
@options.seed(help="[default: 0]")
@click.option("--overwrite", is_flag=True, help="Measure everything again.")
def profile(overwrite: bool, draft_models: tuple[dict[str, str], ...], **values: Any) -> None:
    """Measure a model on this machine once; `refrain simulate` and the policies use the result.

    This takes about 10 minutes on a GPU. Repeat the command to continue an interrupted profile.

    \b
    refrain profile --model infra/demo/model --dtype float32 --max-context 384
    """
    from refrain.flows.launch import launch_profile

    given = values | {"draft_models": list(draft_models) or None}
    run_command(lambda: launch_profile(given, overwrite))


@main.command()
@click.argument("checkpoint")
@click.argument("data", nargs=-1, metavar="[DATA]... [OVERRIDE]...")
@options.count("--samples", help="Samples per prompt.  [default: as in the checkpoint's run]")
@options.seed(help="[default: as in the checkpoint's run, or 0]")
@click.option(
    "--config",
    metavar="RUN|FILE",
    help="Use the data limits, sampling and reward of this run or file.  [default: the "
    "checkpoint's run]",
)
@click.option("--name", help="The evaluation's name.  [default: of checkpoint and data]")
@click.option("--log-to-run", is_flag=True, help="Add the figures to the checkpoint's MLflow run.")
@click.option("--resume", is_flag=True, help="Continue an evaluation that was stopped.")
@click.option("--overwrite", is_flag=True, help="Delete an earlier evaluation of the same name.")
@click.option("--json", metavar="FILE", help="Write the figures here; - for standard output.")
@options.runs_dir
def evaluate(
    data: tuple[str, ...], resume: bool, overwrite: bool, json: str | None, **values: Any
) -> None:
    """Evaluate CHECKPOINT on DATA: mean@n, best@n and maj@n by data source.

    CHECKPOINT is a run's checkpoint directory, a run's name (its last checkpoint), or any Hugging
    Face directory. DATA are veRL-style files, by default the run's validation files. With the
    seed and sampling of its run, a checkpoint gets the same samples and figures as in the run's
    validation. rollout.temperature=0 is greedy sampling.

    \b
    refrain evaluate demo
    refrain evaluate runs/demo/checkpoints/global_step_32 test.parquet --samples 8
    refrain evaluate /models/Qwen3-8B test.parquet --config demo rollout.temperature=0.6
    """
    from refrain.flows.launch import launch_evaluate, read_evaluate_config

    run_command(
        lambda: launch_evaluate(read_evaluate_config(data, values), resume, overwrite, json)
    )


@main.command()
@options.runs_dir
@options.prefect_port
@options.mlflow_port
def ui(runs_dir: Path, prefect_port: int, mlflow_port: int) -> None:
    """Serve Prefect's UI, a worker and MLflow's UI on this machine until you press Ctrl-C."""
    from refrain.flows.ui import serve

    run_command(lambda: serve(runs_dir, prefect_port, mlflow_port))


@main.command()
@options.runs_dir
@options.prefect_port
@options.mlflow_port
@click.option("--json", "json_file", metavar="FILE", help="Write it here; - for standard output.")
def doctor(**options: Any) -> None:
    """Check this machine's GPUs, driver, memory, disks, ports and versions, and say how to fix
    problems. Takes seconds and starts nothing. The exit status is 1 when there is a problem.
    """
    from refrain.flows.doctor import launch_doctor

    run_command(lambda: launch_doctor(**options))


@main.command()
@options.runs_dir
def deploy(runs_dir: Path) -> None:
    """Deploy to the Prefect server at PREFECT_API_URL, for workers of its pool `refrain`.

    The pool runs one flow at a time. On one machine, use `refrain ui`, which deploys too.
    """
    from refrain.flows.deployments import launch_deploy

    run_command(lambda: launch_deploy(runs_dir))


@main.command()
@click.argument("trace", required=False)
@click.option("--paper", metavar="NAME", help="Instead of TRACE: pat, rhymerl or specactor.")
@options.count("--engines", help="Engines of the virtual cluster.")
@options.count("--divide", help="Instead of --engines: GPUs to divide between engines and trainer.")
@options.count("--tp", metavar="T", help="GPUs of one engine.  [default: 1]")
@click.option("--profile", metavar="PATH", help="Measured latency: a profile, or its name.")
@click.option("--hardware", metavar="NAME", help="Computed latency: the GPU, for example H100.")
@click.option("--shape", metavar="NAME", help="With --hardware: the model, for example Qwen3-8B.")
@click.option(
    "--policies",
    default="even,ranked",
    show_default=True,
    metavar="LIST",
    help="Policy sets: even, ranked or histopipe (the policies of a pipelined run). Add "
    "+DRAFTER:WINDOW to draft (ranked+ngram:4), or +histospec to draft from history.",
)
@click.option(
    "--acceptance",
    type=options.Finite(0.0, 1.0),
    metavar="P",
    help="Acceptance rate of drafts, for a trace that has none.",
)
@click.option("--steps", metavar="LIST", help="Steps to simulate: 1-10,20.  [default: all]")
@options.count("--gpus-per-node", help="GPUs of a node; TP stays inside one.  [default: 8]")
@options.count("--num-gpus", help="GPUs of the cluster.  [default: as many as the engines need]")
@options.count("--max-num-seqs", help="Requests that an engine decodes at once.  [default: 256]")
@options.count(
    "--kv-tokens", type=options.TOKENS, help="KV cache of one engine.  [default: what fits]"
)
@options.seed(help="Seed of the traces of --paper.  [default: 0]")
@click.option("-o", "--out", type=options.DIRECTORY, metavar="DIR", help="Directory of pictures.")
@click.option("--json", metavar="FILE", help="Write figures and rows here; - for standard output.")
def simulate(**options: Any) -> None:
    """Replay TRACE on virtual engines, to predict the cost of another cluster or policy.

    TRACE is a Parquet trace, a run's refrain.duckdb, its directory, or its name under runs/. The
    command prints step time, throughput and idle share for each policy set, and draws when each
    engine was busy. --paper also simulates the parts of a paper one by one, and one controller
    over all of them; this takes minutes. --divide compares ways to divide GPUs between engines
    and trainer (shared or separate, synchronous or pipelined) and recommends one.

    \b
    refrain simulate demo --engines 2 --profile mine
    refrain simulate trace.parquet --engines 8 --hardware H100 --shape Qwen3-8B
    refrain simulate demo --divide 8 --hardware H100 --shape Qwen3-8B --policies ranked
    refrain simulate --paper rhymerl --json -
    """
    from refrain.flows.simulate import launch_simulate
    from refrain.flows.simulate_divisions import launch_divided
    from refrain.flows.simulate_input import Arguments

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
    help="The engines' rollouts, weight syncs and moves over time. Open it in ui.perfetto.dev or "
    "chrome://tracing.",
)
@click.option(
    "--timeline",
    "page",
    type=(click.IntRange(0, 2**31), options.FILE),
    metavar="STEP FILE.html",
    help="A page for the browser about one training step: GPUs, requests, moves, seconds saved.",
)
@click.option(
    "--token-ids", is_flag=True, help="Write the token ids to FILE too, not only their counts."
)
def export(**options: Any) -> None:
    """Export RUN to other tools: its rollouts to FILE, its engines' time to --trace FILE.json, a
    step's timeline to --timeline STEP FILE.html.

    RUN is a run's directory, its refrain.duckdb, or its name under runs/. FILE is Parquet with one
    row per rollout and the columns of schemas/trace.py. `refrain simulate` reads it on any machine.

    \b
    refrain export demo rollouts.parquet
    refrain export demo --trace demo.json
    refrain export demo --timeline 8 step8.html
    """
    from refrain.flows.export import launch_export

    run_command(lambda: launch_export(**options))


@main.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--list]",
)
@click.argument("name", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--list", "listed", is_flag=True, help="List what each measures and its duration.")
def bench(name: str | None, args: tuple[str, ...], listed: bool) -> None:
    """Run the benchmark NAME and print a table. --json FILE writes the results as JSON.

    `refrain bench NAME --help` lists its arguments.

    \b
    refrain bench --list
    refrain bench index --json index.json
    refrain bench drafting demo --profile benchmarks/baselines/profile_demo.json
    """
    from refrain.flows.bench import launch_bench, list_benches

    run_command(list_benches if listed else lambda: launch_bench(name, args))


for command in (
    cli_inputs.data,
    cli_inputs.config,
    cli_inputs.drafter,
    cli_records.samples,
    cli_records.sql,
    cli_records.report,
):
    main.add_command(command)

if __name__ == "__main__":
    main()
