"""Make a draft head for a model, from the model's own responses to your prompts."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from refrain.engines.draft_head.files import SETTINGS, save
from refrain.engines.draft_head.training import Agreement
from refrain.engines.paths import check_place
from refrain.engines.reports.tables import plain_table
from refrain.flows.environment import quieten
from refrain.flows.output_file import making
from refrain.schemas.config import TrainConfig
from refrain.schemas.data import Prompt

HELD_OUT_SHARE = 0.1
"""Share of the prompts that the head is not trained on: its agreement is measured there."""
AT_ONCE = 256
"""Requests that vLLM gets at once, about."""


def launch_drafter_train(
    model: Path,
    data: Sequence[Path],
    out: Path,
    prompts: int,
    samples: int,
    tokens: int,
    prompt_tokens: int,
    temperature: float,
    window: int,
    steps: int,
    dtype: str,
    trust_remote_code: bool,
    seed: int,
    overwrite: bool,
) -> None:
    """Generate responses, train a head and save it. Raise ValueError for bad input before anything
    starts."""
    quieten()  # Before the import of Ray, which reads its token mode then.
    _check_out(out, overwrite)
    together = max(1, AT_ONCE // samples)
    config = TrainConfig.model_validate(
        {
            "name": "drafter",
            "seed": seed,
            "prompts_per_step": together,
            "model": {"path": model, "dtype": dtype, "trust_remote_code": trust_remote_code},
            "data": {
                "train": list(data),
                "max_prompt_tokens": prompt_tokens,
                "max_response_tokens": tokens,
            },
            "drafting": {"enabled": False},
            "rollout": {
                "group_size": samples,
                "temperature": temperature,
                "max_num_seqs": together * samples,
            },
            "trainer": {"micro_batch_tokens": prompt_tokens + tokens},
        }
    )
    chosen = read_prompts(config, prompts)
    with making(out):
        make_head(config, chosen, out, num_updates=steps, window=window)


def _check_out(out: Path, overwrite: bool) -> None:
    """Raise ValueError unless the directory is new, empty, or a head to replace."""
    check_place(out, f"--out {out}")
    if not out.exists() or not any(out.iterdir()):
        return
    if not (out / SETTINGS).is_file():
        raise ValueError(f"--out {out} holds other files: give the name of a new directory")
    if not overwrite:
        raise ValueError(
            f"--out {out} holds a draft head: give another directory, or --overwrite to replace it"
        )


def read_prompts(config: TrainConfig, most: int) -> list[Prompt]:
    """Return at most `most` prompts in random order. Raise ValueError for a model or data that a
    run would refuse, and for a single prompt."""
    from refrain.engines.data.dataset import load_dataset
    from refrain.engines.data.messages import PromptSettings
    from refrain.engines.inference.engine.supported import check_version
    from refrain.tasks.run.model_inputs import (
        check_against_transformers,
        check_model,
        read_tokenizer,
    )
    from refrain.tasks.run.preflight import check_engine_fits

    check_version()
    check_model(config.model, "MODEL")
    try:
        check_engine_fits(config)
    except ValueError as error:
        raise ValueError(f"--prompt-tokens and --tokens: {error}") from error
    check_against_transformers(config.model, config.max_model_len)
    tokenizer, longest = read_tokenizer(config.model), config.data.max_prompt_tokens
    settings = PromptSettings(drops_overlong=True)
    found = load_dataset(config.data.train_files, tokenizer, longest, settings=settings).prompts
    if min(len(found), most) < 2:
        raise ValueError(
            f"DATA has {len(found)} prompts of at most {longest} tokens, and --prompts is {most}: "
            "a head needs at least 2, one to train on and one to be measured on. Add prompts, or "
            "raise --prompt-tokens or --prompts"
        )
    order = np.random.default_rng(config.seed).permutation(len(found))
    return [found[at] for at in order[:most]]


def make_head(
    config: TrainConfig, prompts: Sequence[Prompt], out: Path, *, num_updates: int, window: int
) -> None:
    """Generate responses, train a head and write it. Print its agreement on held-out prompts."""
    from refrain.tasks.drafter import roll_out, train_head
    from refrain.tasks.run.model_inputs import text_config

    console = Console(highlight=False, markup=False)
    sequences = asyncio.run(roll_out(config, prompts, console.print))
    num_held_out = max(1, round(HELD_OUT_SHARE * len(prompts))) * config.rollout.group_size
    trained = train_head(
        config,
        sequences[num_held_out:],
        sequences[:num_held_out],
        num_updates=num_updates,
        depth=window,
        report=console.print,
    )
    save(trained.head, out, vocab_size=text_config(config.model).vocab_size, window=window)
    console.print(_table(trained.before, trained.after))
    lengths = (trained.before.acceptance_length, trained.after.acceptance_length)
    console.print("tokens per verification: {:.2f} before, {:.2f} after".format(*lengths))
    console.print(f"{out}: set specactor.head={out}")


def _table(before: Agreement, after: Agreement) -> Table:
    table = plain_table("draft token", "right before", "right after")
    for depth, rates in enumerate(zip(before.by_depth, after.by_depth, strict=True), 1):
        table.add_row(str(depth), *(f"{rate:.1%}" for rate in rates))
    return table
