"""Commands that read a run's record: `refrain samples`, `refrain sql` and `refrain report`."""

from pathlib import Path
from typing import Any

import click

from refrain.flows import options
from refrain.flows.command import run_command


@click.command()
@click.argument("run")
@options.runs_dir
@click.option("--step", type=click.IntRange(0, 2**31 - 1), metavar="N", help="Only this step.")
@click.option(
    "--prompt", default="", metavar="KEY", help="Only the prompt whose key begins like this."
)
@click.option(
    "--sample",
    type=click.IntRange(-(2**31), 2**31 - 1),
    metavar="N",
    help="With --step and --prompt: one sample in detail.",
)
@click.option(
    "--split", type=click.Choice(["train", "validation"]), default="train", show_default=True
)
@click.option(
    "--sort",
    type=click.Choice(["step", "epoch", "reward", "length", "entropy"]),
    default="step",
    show_default=True,
    help="The largest first.",
)
@click.option("--reverse", is_flag=True, help="The smallest first.")
@click.option("--grep", default="", metavar="TEXT", help="Only responses that contain this text.")
@click.option("--limit", type=click.IntRange(1, 1000), default=10, show_default=True, metavar="N")
@click.option(
    "--colour",
    type=click.Choice(["logprob", "version"]),
    default="logprob",
    show_default=True,
    help="Colour tokens by their probability or by the policy version that sampled them.",
)
@click.option(
    "--serve",
    "port",
    type=options.PORT,
    metavar="PORT",
    help="Serve pages for your browser on this port of this machine, until Ctrl-C.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=options.SECONDS,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
)
def samples(run: str, runs_dir: Path, **options: Any) -> None:
    """Show RUN's prompts, responses and rewards, during training or afterwards.

    The newest step comes first. `entropy`: the mean negative log-probability of the sampled tokens.

    \b
    refrain samples demo --sort reward --reverse --limit 5
    refrain samples demo --step 24 --prompt 3fa9 --sample 0
    refrain samples demo --serve 5001
    """
    from refrain.flows.samples import launch_samples

    run_command(lambda: launch_samples(run, runs_dir, **options))


@click.command()
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
@click.option(
    "--csv", "csv_file", metavar="FILE", help="Write all rows here; - for standard output."
)
def sql(**options: Any) -> None:
    """Query RUN's store in DuckDB's SQL, during training or afterwards. The store is read-only.

    Tables: rollouts, rewards, plans, outcomes, steps. Views: step_metrics (step, epoch, name,
    value), acceptance (by step, engine and drafter), lengths (by step and prompt).

    \b
    refrain sql demo "SELECT step, max(max_tokens) FROM lengths GROUP BY step ORDER BY step"
    refrain sql demo "DESCRIBE rollouts"
    """
    from refrain.flows.sql import launch_sql

    run_command(lambda: launch_sql(**options))


@click.command()
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
@click.option("--png", "png_file", metavar="FILE", help="Draw the report here.")
def report(**options: Any) -> None:
    """Measure how similar RUN's responses are from epoch to epoch, during training or afterwards:
    shared tokens, and ranks of lengths (RhymeRL, sections 5.1, 5.4, 6.1 and 6.3).
    """
    from refrain.flows.report import launch_report

    run_command(lambda: launch_report(**options))
