"""Drafting with your model and your prompts: its speed-up, by temperature and by epoch.

    refrain bench real ~/models/SmolLM2-135M-Instruct data/reasoning-gym/train.parquet

Nothing is trained: the policy does not change. The bench answers the same prompts in several epochs
at each temperature, each epoch with new noise. The temperature controls the entropy: a trained 7B
model has 0.2 to 0.6 nats per token at temperature 1, a small untrained one 2 and more. Engines
generate in turn:

    stock   vLLM as installed: no speculation, its own sampling
    off     refrain with drafting off
    on      refrain with drafting on, and the history of earlier epochs
    head    the same with a draft head beside the history (with --head DIR)

All but `stock` must generate the same tokens; in bfloat16 near-ties may flip. A lap of `on` is
compared with the lap of `off` beside it. `nats` is the mean of -log p over the sampled
tokens. `own` and `shared` are shares of all tokens and add up to `from drafts`. `gated`
is the share of steps that verified nothing.

Two columns come from a replay of the same responses. `ngram` is the share of tokens that vLLM's
prompt lookup would draft. `if cheap` is the decoding speed-up of refrain's drafter on a machine
where verifying a token takes a tenth of generating one, for example a GPU with few rows.

The first temperature has more laps (`--first-laps`): drafts gain least there, so you see what they
cost. Choose sizes so that a lap takes at least half a minute. On a GPU all engines share the first
card (not run on one yet).
"""

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from refrain.benchmarks import one_step
from refrain.benchmarks.laps import Measured, Row, check_counts, rows_with
from refrain.benchmarks.lockstep import Batch, generate_again
from refrain.benchmarks.plots import draw_over_entropy, ending
from refrain.benchmarks.temperature_engines import DRAFTING, DialRun, DialTurn, groups_of
from refrain.engines.histospec.library import PromptHistory
from refrain.engines.histospec.predicted_gain import CHEAP, RowTimes
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport
from refrain.schemas.config import TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.keys import sample_key
from refrain.schemas.rollout import RequestId

PACKAGES = (*one_step.PACKAGES, "transformers")
COMPARED = (
    *("nats", "speculation_rate", "acceptance_length", "gated"),
    *("own", "shared", "ngram", "if_cheap"),
)
OF_HEAD = ("acceptance_length", "acceptance_rate", "speculation_rate", "gated")
Columns = dict[str, tuple[str, str]]
"""Figures without the temperature and the epoch, with their title and format."""
SPEED_TABLE: Columns = {
    "nats": ("nats", ".2f"),
    "on_over_off": ("on/off", ".3f"),
    "on_over_stock": ("on/stock", ".3f"),
    "speculation_rate": ("from drafts", ".1%"),
    "acceptance_length": ("length", ".2f"),
    "gated": ("gated", ".0%"),
}
SOURCES_TABLE: Columns = {
    "own": ("own", ".1%"),
    "shared": ("shared", ".1%"),
    "ngram": ("ngram", ".1%"),
    "if_cheap": ("if cheap", ".2f"),
}
HEAD_TABLE: Columns = {
    "head_over_off": ("head/off", ".3f"),
    "head_acceptance_length": ("length", ".2f"),
    "head_acceptance_rate": ("accepted", ".0%"),
    "head_gated": ("gated", ".0%"),
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="a Hugging Face directory")
    parser.add_argument(
        "data", metavar="DATA", type=Path, help="a file with prompts, as in data.train"
    )
    numbers = {
        "--prompts": (16, "number of prompts, the first ones of DATA"),
        "--samples": (8, "responses per prompt and epoch"),
        "--tokens": (160, "longest response in tokens"),
        "--prompt-tokens": (1024, "longest prompt in tokens; longer ones are left out"),
        "--epochs": (3, "passes over the prompts at each temperature"),
        "--laps": (1, "laps per epoch; stock vLLM has one"),
        "--first-laps": (3, "laps per epoch at the first temperature"),
        "--seed": (0, "seed of the noise"),
    }
    for option, (default, what) in numbers.items():
        text = f"{what} [default: {default}]"
        parser.add_argument(option, type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--temperatures", default="1.0,0.8,0.6,0.4", metavar="LIST", help="[default: %(default)s]"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="data type of the engines [default: float32, in which no token may differ]",
    )
    parser.add_argument(
        "--head", type=Path, metavar="DIR", help="a draft head, from `refrain drafter train`"
    )
    parser.add_argument(
        "--ungated",
        action="store_true",
        help="verify the head's drafts even where they do not pay, to see how often they are right",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="a PNG that shows the speed-up over entropy"
    )


def measure(args: Namespace, console: Console) -> Measured:
    config, temperatures, prompts = read_arguments(args)
    with TemporaryDirectory(prefix="refrain-bench-") as directory:
        bench = DialRun(args, config, prompts, Path(directory), console)
        turns = asyncio.run(bench.run(temperatures))
    rows = [turn.row() for turn in turns]
    for temperature in temperatures:
        own = [turn for turn in turns if (turn.engine, turn.temperature) == ("on", temperature)]
        epochs = {turn.epoch: turn.lap.tokens for turn in own}
        replayed = dict(zip(epochs, replay(config, prompts, list(epochs.values())), strict=True))
        for row in rows_with(rows, engine="on", temperature=temperature):
            row |= replayed[row["epoch"]]
    measured = figures(rows) | {"identical": share_identical(turns)}
    if args.plot:
        draw_over_entropy(measured, temperatures, args.epochs, args.model.name, args.plot)
        console.print(f"{args.plot}: speed-up over entropy")
    return measured, rows


def read_arguments(args: Namespace) -> tuple[TrainConfig, list[float], list[Prompt]]:
    """Return a config for the model, the temperatures and the prompts. Raise ValueError for a model
    or data that a run would refuse, and for numbers out of bounds."""
    from refrain.engines.data.dataset import load_dataset
    from refrain.tasks.run.model_inputs import check_draft_head, check_model, read_tokenizer
    from refrain.tasks.run.preflight import check_engine_fits

    check_counts(args, "prompts", "tokens", "prompt_tokens", "epochs", "laps", "first_laps")
    if args.samples < 2:
        raise ValueError(f"--samples {args.samples}: give at least 2")
    if args.plot and args.plot.suffix != ".png":
        raise ValueError(f"--plot {args.plot}: give a name that ends in .png")
    temperatures = _temperatures(args.temperatures)
    config = _config(args)
    check_model(config.model, "MODEL")
    check_engine_fits(config)
    check_draft_head(args.head, config.model)
    tokenizer = read_tokenizer(config.model)
    found = load_dataset([args.data], tokenizer, args.prompt_tokens).prompts
    if len(found) < args.prompts:
        raise ValueError(f"--prompts {args.prompts}: {args.data} has {len(found)} usable ones")
    return config, temperatures, list(found[: args.prompts])


def _temperatures(text: str) -> list[float]:
    try:
        given = [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--temperatures {text}: give numbers, as in 1.0,0.6") from error
    if not all(0.05 <= one <= 5.0 for one in given) or len({*map(ending, given)}) < len(given):
        raise ValueError(f"--temperatures {text}: give different ones from 0.05 to 5, to a tenth")
    return given


def _config(args: Namespace) -> TrainConfig:
    longest = args.prompt_tokens + args.tokens
    return TrainConfig.model_validate(
        {
            "name": "real",
            "seed": args.seed,
            "prompts_per_step": args.prompts,
            "model": {"path": args.model, "dtype": args.dtype},
            "data": {
                "train": [args.data],
                "max_prompt_tokens": args.prompt_tokens,
                "max_response_tokens": args.tokens,
            },
            "rollout": {
                "group_size": args.samples,
                "max_num_seqs": min(256, args.prompts * args.samples),
            },
            "trainer": {"micro_batch_tokens": longest},
        }
    )


def replay(
    config: TrainConfig, prompts: Sequence[Prompt], epochs: Sequence[dict[RequestId, Sequence[int]]]
) -> list[Row]:
    """Generate the responses of each epoch again, by vLLM's prompt lookup and by refrain's drafter
    on a machine with cheap verification. Return the columns from this."""
    from refrain.benchmarks.drafters import NGram, Shipped

    texts = {prompt.key: np.array(prompt.token_ids, np.int32) for prompt in prompts}
    history: dict[str, PromptHistory] = {}
    found = []
    with TemporaryDirectory(prefix="refrain-bench-") as directory:
        num_rows = len(epochs[0])
        shipped = Shipped(config.engine.drafting, RowTimes(CHEAP), num_rows, Path(directory), 1)
        for number, tokens in enumerate(epochs):
            responses = [np.array(one, np.int32) for one in tokens.values()]
            batch = Batch(
                texts,
                [id.prompt_key for id in tokens],
                responses,
                history,
                [_key_of(config, id) for id in tokens],
            )
            looked_up, drafted = (generate_again(batch, one) for one in (NGram(), shipped))
            seconds = drafted.num_passes + CHEAP * drafted.num_drafted
            speedup = sum(map(len, responses)) / seconds
            found.append({"ngram": looked_up.speculation_rate, "if_cheap": speedup})
            history = {one.prompt_key: one for one in groups_of(number, prompts, tokens)}
            shipped.learn(list(history.values()))
    return found


def _key_of(config: TrainConfig, id: RequestId) -> int:
    return sample_key(config.seed, id.step, id.split, id.prompt_key, id.sample_index)


def share_identical(turns: Sequence[DialTurn]) -> float:
    """Return the share of sequences with drafting that equal those of `off` token for token."""
    of = {(turn.engine, turn.temperature, turn.epoch, turn.number): turn.lap for turn in turns}
    pairs = [(lap, of["off", *rest]) for (engine, *rest), lap in of.items() if engine in DRAFTING]
    return fmean(
        list(tokens) == list(off.tokens[id])
        for on, off in pairs
        for id, tokens in on.tokens.items()
    )


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Summarise the laps: medians over the laps of a temperature and an epoch, ratios over laps
    that ran beside each other."""
    found: dict[str, float] = {}
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    epochs = list(dict.fromkeys(row["epoch"] for row in rows))
    for temperature in temperatures:
        for epoch in epochs:
            laps = rows_with(rows, temperature=temperature, epoch=epoch)
            end = f"{ending(temperature)}_epoch_{epoch}"
            found[f"on_over_off_{end}"] = _ratio(laps, "off")
            found[f"on_over_stock_{end}"] = _ratio(laps, "stock")
            on = rows_with(laps, engine="on")
            found |= {f"{name}_{end}": median(row[name] for row in on) for name in COMPARED}
            if head := rows_with(laps, engine="head"):
                found[f"head_over_off_{end}"] = _ratio(laps, "off", "head")
                found |= {
                    f"head_{name}_{end}": median(row[name] for row in head) for name in OF_HEAD
                }
    useless, last = ending(max(temperatures)), ending(min(temperatures))
    found["on_over_off_where_useless"] = min(
        found[f"on_over_off_{useless}_epoch_{epoch}"] for epoch in epochs
    )
    found[f"on_over_off_{last}"] = found[f"on_over_off_{last}_epoch_{epochs[-1]}"]
    return found


def _ratio(laps: Sequence[Row], other: str, engine: str = "on") -> float:
    """Return the tokens per second of an engine / those of another one, lap by lap."""
    of = {row["lap"]: row["tokens_per_s"] for row in rows_with(laps, engine=other)}
    compared = [row for row in rows_with(laps, engine=engine) if row["lap"] in of]
    return median(row["tokens_per_s"] / of[row["lap"]] for row in compared)


def show(report: BenchReport, console: Console) -> None:
    places = dict.fromkeys((row["temperature"], row["epoch"]) for row in report.rows)
    has_head = bool(rows_with(report.rows, engine="head"))
    for columns in (SPEED_TABLE, SOURCES_TABLE, *([HEAD_TABLE] if has_head else [])):
        console.print(_table(report.figures, places, columns))
    console.print(f"sequences that are the same with drafting: {report.figures['identical']:.1%}")


def _table(
    figures: dict[str, float], places: Iterable[tuple[float, int]], columns: Columns
) -> Table:
    table = plain_table("temperature", "epoch", *(title for title, _ in columns.values()))
    for temperature, epoch in places:
        end = f"{ending(temperature)}_epoch_{epoch}"
        cells = (format(figures[f"{name}_{end}"], how) for name, (_, how) in columns.items())
        table.add_row(f"{temperature:g}", str(epoch), *cells)
    return table
