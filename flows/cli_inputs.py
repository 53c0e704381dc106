"""Commands about the inputs of a run: `refrain data`, `refrain config` and `refrain drafter`."""

from pathlib import Path
from typing import Any

import click

from refrain.flows import options
from refrain.flows.command import run_command


@click.command()
@click.argument("name", metavar="NAME|OWNER/NAME|FILE")
@click.argument("sets", metavar="[SET]...", nargs=-1)
@click.option(
    "--from",
    "files",
    type=options.FILE,
    multiple=True,
    metavar="FILE",
    help="Local file with original rows, instead of the Hub. Each makes a file of the same name.",
)
@click.option("-o", "--out", type=options.DIRECTORY, metavar="DIR", help="[default: data/NAME]")
@click.option("--revision", metavar="REV", help="Revision on the Hub.  [default: the newest]")
@click.option(
    "--split",
    multiple=True,
    metavar="SPLIT",
    help="Split of OWNER/NAME, or a slice of it: train[:1000].  [default: train]",
)
@click.option("--subset", metavar="NAME", help="Subset of OWNER/NAME, if it has several.")
@click.option(
    "--prompt",
    "--question",
    "question",
    metavar="COLUMN",
    help="Prompts in OWNER/NAME or FILE: texts or messages. Leave out if its rows are veRL's.",
)
@click.option("--answer", metavar="COLUMN", help="Right answers there.")
@click.option(
    "--data-source",
    metavar="NAME",
    help="Scorer for them: the data source, as openai/gsm8k.  [default: OWNER/NAME]",
)
@click.option("--instruction", default="", metavar="TEXT", help="Text after each prompt of them.")
@options.count("--size", help="Questions to train on, of all SETs together.  [default: 1000]")
@click.option(
    "--held-out",
    type=click.IntRange(0, 1_000_000),
    metavar="N",
    help="More questions, for validation.  [default: 100]",
)
@options.seed(help="Seed of the questions.  [default: 0]")
@click.option(
    "--difficulty",
    type=options.Numbers(most=1000),
    metavar="LEVELS",
    help="Levels of SETs, from 0, as in 0,2,4: equally many questions each, easier ones first.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
def data(name: str, **given: Any) -> None:
    """Convert gsm8k, math, dapo17k, aime, any data set OWNER/NAME, or your own FILE to training
    files in veRL's format.

    The rows come from the Hugging Face Hub, or from local copies of its files. Of OWNER/NAME and
    FILE you name the columns. `reasoning-gym` generates questions of its SETs, as many as you like.

    \b
    refrain data gsm8k
    refrain data gsm8k --from downloads/train.jsonl --from downloads/test.jsonl
    refrain data OWNER/NAME --prompt question --answer solution --split train
    refrain data mine.jsonl --prompt problem --answer result --data-source math_dapo
    refrain data reasoning-gym chain_sum gsm_symbolic --size 2000 --difficulty 0,1
    """
    from refrain.flows.data import launch_data

    run_command(lambda: launch_data(name, **given))


@click.command()
@click.argument("config_file", metavar="[CONFIG]", required=False)
@click.argument("overrides", nargs=-1)
@click.option("--schema", is_flag=True, help="Print the JSON schema of all configs, for editors.")
@click.option("--reference", is_flag=True, help="Print every setting (docs/configuration.md).")
@click.option("--metrics", is_flag=True, help="Print every metric (docs/metrics.md).")
@click.option("--api", is_flag=True, help="Print the Python API (docs/api.md).")
def config(**options: Any) -> None:
    """Print a run's complete config: the values of CONFIG, the overrides and all defaults.

    \b
    refrain config my.yaml trainer.learning_rate=2e-6
    refrain config --schema > refrain.schema.json
    """
    from refrain.flows.show_config import launch_config

    run_command(lambda: launch_config(**options))


@click.group()
def drafter() -> None:
    """Make drafters for `specactor`."""


@drafter.command()
@click.argument("model", type=options.DIRECTORY)
@click.argument("data", nargs=-1, required=True, type=options.FILE)
@click.option(
    "-o",
    "--out",
    required=True,
    type=options.DIRECTORY,
    metavar="DIR",
    help="The head's directory.",
)
@options.count("--prompts", default=512, show_default=True, help="Most prompts to answer.")
@options.count("--samples", default=4, show_default=True, help="Responses to each prompt.")
@options.count("--tokens", default=256, show_default=True, help="Longest response.")
@options.count(
    "--prompt-tokens",
    default=1024,
    show_default=True,
    help="Longest prompt; longer ones are left out.",
)
@click.option(
    "--temperature",
    type=options.Finite(0.05, 5.0),
    default=1.0,
    show_default=True,
    metavar="T",
    help="Sampling temperature, best that of your runs.",
)
@click.option(
    "--window",
    type=click.IntRange(1, 16),
    default=4,
    show_default=True,
    metavar="N",
    help="Tokens that the head learns to draft one after the other.",
)
@options.count(
    "--steps", default=1000, show_default=True, help="Updates, each on about 1,000 tokens."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="bfloat16",
    show_default=True,
    help="Data type of the model.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run the Python code in MODEL.")
@options.seed(default=0, show_default=True)
@click.option("--overwrite", is_flag=True, help="Replace the head in DIR.")
def train(model: Path, **values: Any) -> None:
    """Train a draft head for MODEL on its own responses to the prompts of DATA.

    MODEL is a Hugging Face directory, DATA are files with prompts as in `data.train`. The command
    prints how often the head drafts the right token on held-out prompts. A tenth of the prompts is
    held out. Nothing is written until the head is trained.

    \b
    refrain drafter train models/smollm2 data/smollm2/train.parquet --out heads/smollm2
    refrain drafter train /models/Qwen3-8B train.parquet --out heads/qwen3 --steps 5000
    """
    from refrain.flows.drafter import launch_drafter_train

    run_command(lambda: launch_drafter_train(model, **values))
