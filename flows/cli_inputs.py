"""Commands about what a run begins with: its data and its config."""

from typing import Any

import click

from flows import options
from flows.command import run_command


@click.command()
@click.argument("name", metavar="NAME|FILE")
@click.argument("sets", metavar="[SET]...", nargs=-1)
@click.option(
    "--from",
    "files",
    type=options.FILE,
    multiple=True,
    metavar="FILE",
    help="Its rows, in their original form, in place of the Hub's; each gives a file of its name.",
)
@click.option("-o", "--out", type=options.DIRECTORY, metavar="DIR", help="[default: data/NAME]")
@click.option("--revision", metavar="REV", help="On the Hub.  [default: the newest]")
@click.option("--question", metavar="COLUMN", help="Of FILE; without these, its rows are veRL's.")
@click.option("--answer", metavar="COLUMN", help="Of FILE: the right answer.")
@click.option("--data-source", metavar="NAME", help="Of FILE: who scores it, as openai/gsm8k.")
@click.option("--instruction", default="", metavar="TEXT", help="After each question of FILE.")
@options.count("--size", help="Questions to train on, of all SETs.  [default: 1000]")
@click.option(
    "--held-out",
    type=click.IntRange(0, 1_000_000),
    metavar="N",
    help="Further questions, to validate with.  [default: 100]",
)
@options.seed(help="Of the questions.  [default: 0]")
@click.option(
    "--difficulty",
    type=options.Numbers(most=1000),
    metavar="LEVELS",
    help="Of SETs, from 0, as in 0,2,4: as many of each, easier ones first.",
)
@click.option("--overwrite", is_flag=True, help="Replace files that are there.")
def data(name: str, **given: Any) -> None:
    """Make training files, in veRL's format, of gsm8k, math, dapo17k, aime, or FILE of your own.

    From the Hugging Face Hub, or from local files of the same rows. `reasoning-gym` makes questions
    of its SETs, with as many answers as you like.

    \b
    refrain data gsm8k
    refrain data gsm8k --from downloads/train.jsonl --from downloads/test.jsonl
    refrain data mine.jsonl --question problem --answer result --data-source math_dapo
    refrain data reasoning-gym chain_sum gsm_symbolic --size 2000 --difficulty 0,1
    """
    from flows.data import launch_data

    run_command(lambda: launch_data(name, **given))


@click.command()
@click.argument("config_file", metavar="[CONFIG]", required=False)
@click.argument("overrides", nargs=-1)
@click.option("--schema", is_flag=True, help="The JSON schema of all configs, for editors.")
@click.option("--reference", is_flag=True, help="Every setting, as docs/configuration.md has it.")
@click.option("--metrics", is_flag=True, help="Every metric, as docs/metrics.md has it.")
def config(**options: Any) -> None:
    """Print CONFIG as a run would have it: its values, the overrides, and all defaults.

    \b
    refrain config my.yaml trainer.learning_rate=2e-6
    refrain config --schema > refrain.schema.json
    """
    from flows.show_config import launch_config

    run_command(lambda: launch_config(**options))
