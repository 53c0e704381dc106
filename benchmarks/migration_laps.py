"""Long responses that move to another engine halfway: requests, laps and row contents for the
benches that measure such moves."""

import asyncio
import random
import shutil
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from refrain.benchmarks import one_step
from refrain.benchmarks.laps import Row, in_turn, rows_with
from refrain.engines.gpus.placement import Wanted
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.rollout.tracked_engine import num_response_tokens
from refrain.flows.config_file import load_config
from refrain.schemas.config import TrainConfig
from refrain.schemas.keys import sample_key
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights

_RESPONSE_TOKENS = 96
_TAKEN_AT = 32
"""Response tokens of all unfinished requests when they move."""
_TOKENIZER = Path("infra/demo/model")
Finished = dict[RequestId, Rollout]
Work = dict[int, list[RolloutRequest]]
"""Requests by the number of prompt tokens."""


def add_arguments(parser: ArgumentParser, num_responses: int) -> None:
    parser.add_argument("config", metavar="CONFIG", nargs="?", type=Path)
    parser.add_argument(
        "--contexts",
        type=_tokens,
        default=(512, 2048),
        metavar="N,N",
        help="prompt lengths in tokens, in turn [default: 512,2048]",
    )
    parser.add_argument(
        "--responses",
        type=int,
        default=num_responses,
        metavar="N",
        help=f"responses that move [default: {num_responses}]",
    )
    parser.add_argument(
        "--laps", type=int, default=3, metavar="N", help="laps of each mode [default: 3]"
    )


def _tokens(text: str) -> tuple[int, ...]:
    given = tuple(int(number) for number in text.split(",") if number.strip().isdigit())
    if not given or min(given) < 1 or len(given) != text.count(",") + 1:
        raise ArgumentTypeError(f"{text!r} must list token counts, for example 512,2048")
    return given


def config_of(args: Namespace, directory: Path) -> TrainConfig:
    """Return the given config, or one for a model that is made in the directory."""
    config = load_config(args.config or _TOKENIZER.parent / "train.yaml")
    if args.config is None:
        model = config.model.model_copy(update={"path": _make_model(directory)})
        rollout = config.rollout.model_copy(update={"kv_cache_bytes": 2**29})
        config = config.model_copy(update={"model": model, "rollout": rollout})
    lengths = {"max_prompt_tokens": max(args.contexts), "max_response_tokens": _RESPONSE_TOKENS}
    return config.model_copy(update={"data": config.data.model_copy(update=lengths)})


def _make_model(path: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=4096,
        max_position_embeddings=2**16,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    for file in _TOKENIZER.glob("tokenizer*"):
        shutil.copyfile(file, path / file.name)
    return path


def two_engines(config: TrainConfig) -> Wanted:
    return Wanted("two engines", 2 * config.rollout.tp_degree, "twice rollout.tp_degree")


def work_of(config: TrainConfig, args: Namespace) -> tuple[Work, PolicyWeights]:
    """Return requests, and the weights for the engines."""
    work = {context: _requests(config, context, args.responses) for context in args.contexts}
    canaries = [request.prompt_token_ids[:64] for request in work[max(work)][:4]]
    return work, one_step.first_weights(config, canaries)


def _requests(config: TrainConfig, context: int, num: int) -> list[RolloutRequest]:
    """Return one request for each of several prompts that begin differently."""
    from transformers import AutoConfig

    drawn = random.Random(context)
    num_words = AutoConfig.from_pretrained(config.model.path).vocab_size
    return [
        RolloutRequest(
            id=RequestId(Split.TRAIN, 1, f"{context}-{i}", 0),
            prompt_token_ids=tuple(drawn.randrange(3, num_words) for _ in range(context)),
            sample_key=sample_key(config.seed, 1, Split.TRAIN, f"{context}-{i}", 0),
            max_response_tokens=_RESPONSE_TOKENS,
        )
        for i in range(num)
    ]


async def laps_of(
    measure_one: Callable[[Sequence[RolloutRequest], str], Awaitable[Row]],
    work: Work,
    modes: Sequence[str],
    num_laps: int,
    console: Console,
) -> list[Row]:
    """Return the rows of every mode with every context, lap by lap. A first lap does not count:
    memory is allocated then."""
    rows = []
    for lap in range(num_laps + 1):
        for context, requests in work.items():
            for mode in in_turn(modes, lap):
                row = await measure_one(requests, mode)
                rows.append({"context": context, "lap": lap} | row)
        console.print(f"lap {lap}/{num_laps}")
    return [row for row in rows if row["lap"]]


def one_token_of(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """Limit each request to its next token: engines do not report when a moved response gets its
    first."""
    return [replace(r, max_response_tokens=num_response_tokens(r) + 1) for r in requests]


def compared(finished: Sequence[Finished], expected: Finished) -> Row:
    same = [
        rollout.generated.token_ids == expected[id].generated.token_ids
        for of_engine in finished
        for id, rollout in of_engine.items()
    ]
    return {"num_sequences": len(same), "num_identical": sum(same)}


def contexts_of(requests: Sequence[RolloutRequest], first: Finished) -> Row:
    """Return the tokens of the requests on their new engine, and how many of them it did not
    compute. `first`: the next token of each."""
    num_tokens = sum(len(r.prompt_token_ids) + num_response_tokens(r) for r in requests)
    num_cached = sum(rollout.num_cached_tokens for rollout in first.values())
    return {"context_tokens": num_tokens, "cached_share": num_cached / num_tokens}


async def generate(engine: RayEngine, requests: Sequence[RolloutRequest]) -> Finished:
    await engine.submit(requests)
    return await finish(engine, len(requests))


async def until_begun(engine: RayEngine, requests: Sequence[RolloutRequest]) -> None:
    """Wait until all requests have `_TAKEN_AT` tokens. Events would report it too late."""
    ids = [request.id for request in requests]
    while min(map(num_response_tokens, await engine.copy(ids)), default=_TAKEN_AT) < _TAKEN_AT:
        await asyncio.sleep(0.02)


async def finish(engine: RayEngine, num: int) -> Finished:
    """Collect at least `num` finished rollouts."""
    finished: Finished = {}
    while len(finished) < num:
        told: Any = (await engine.next_events()).finished
        finished |= {rollout.id: rollout for rollout in await one_step.fetch(told)}
    return finished


def identical_shares(rows: Sequence[Row], modes: Sequence[str]) -> dict[str, float]:
    """Return the share of sequences with the expected tokens, by mode."""
    of_mode = {mode: rows_with(rows, mode=mode) for mode in modes}
    return {
        f"identical_{mode}": sum(row["num_identical"] for row in own)
        / sum(row["num_sequences"] for row in own)
        for mode, own in of_mode.items()
    }
