"""Conversations with tools on a real engine: are its slots in use, and its prefix cache?

An engine has few slots (`max_num_seqs`). A conversation has 5 turns of seeded lengths, and a tool
answers after each but the last. Tools take 0.2 to 2 s where a turn takes 2 s. The demo's model is
faster than that, so the bench scales these seconds: `--wait` is the mean time of a tool in percent
of the mean time of a turn. All conversations are submitted at once, 1 to 8 for each slot, in three
kinds of laps:

    without   the same number of tokens in one response, without an environment
    instant   turns, and tools that return at once
    tools     the same turns, and tools that take their time

The share of slots in use is the time that requests run in vLLM, divided by the number of slots and
by the time from the first submission to the last end. So the end of a lap counts, where slots run
empty. It is shorter with turns than with whole responses, so a lap with tools is compared with the
better of the other two.

    slots_in_use_N        slots in use with tools, over the better lap, N conversations a slot
    seconds_N             seconds of that lap, over those with instant tools
    instant_seconds_N     seconds with instant tools, over those without an environment
    wait_over_turn_N      mean time of a tool, over that of a turn, as it was
    identical             conversations with the same tokens whether tools take their time or not
    cached_share          full KV blocks found in vLLM's prefix cache when a turn returns, if the
                          KV cache has room for all conversations
    cached_share_half     the same if it has room for half of them
    answers_per_s         answers of one actor to turns whose tool returns at once
    journal_share         share of its time that the store spends on the journal: the largest
                          median of laps with turns, or of these answers
"""

import asyncio
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import ray
from rich.console import Console

from refrain.benchmarks import one_step
from refrain.benchmarks.laps import Measured, Row, check_counts, rows_with
from refrain.benchmarks.talks import (
    MEAN_TOOL_S,
    OBSERVED_TOKENS,
    TURNS,
    Talk,
    TalkLap,
    kv_tokens,
    make_talks,
)
from refrain.benchmarks.temperature_engines import AS_IT_IS
from refrain.benchmarks.turn_engine import TurnEngine
from refrain.engines.bounded import wait_for
from refrain.engines.environment.client import EnvironmentClient, answered
from refrain.engines.gpus.placement import Wanted
from refrain.engines.inference.engine.conversations import NOTHING, with_turn
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.reports.tables import plain_table
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.store.actor import start_store
from refrain.flows.config_file import load_config
from refrain.schemas.bench import BenchReport
from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest, Split
from refrain.tasks.run.attach import STORE
from refrain.tasks.run.environments import start_environments
from refrain.tasks.run.model_inputs import model_shape
from refrain.tasks.run.preflight import check_engine_fits, read_inputs
from refrain.tasks.run.ray_cluster import ray_cluster

PACKAGES = one_step.PACKAGES
TOOL = Path(__file__).with_name("sleeping_tool.py")
KINDS = ("without", "instant", "tools")
KV_SHARES = {"": 1.0, "_half": 0.5}
"""Shares of the conversations for which the KV cache has room, by the end of a figure's name."""
AT_ONCE, WARM_UP = 64, 64
"""Conversations that ask the actor at the same time, and those before the clock starts."""
CALL_S = 60.0
"""Longest time of a call to the engine's actor between two laps."""


def add_arguments(parser: ArgumentParser) -> None:
    one_step.add_config(parser, "infra/demo/train.yaml")
    parser.add_argument(
        "--conversations",
        type=_counts,
        default=(1, 2, 4, 8),
        metavar="N,N",
        help="conversations for each slot, in turn [default: 1,2,4,8]",
    )
    numbers = {
        "--slots": (16, "sequences that the engine decodes at the same time"),
        "--tokens": (72, "mean tokens of a turn; turns have half to one and a half times as many"),
        "--wait": (55, "mean time of a tool in percent of a turn's"),
        "--answers": (4000, "instant answers to time"),
        "--laps": (3, "laps of each kind; one with the smaller KV cache"),
    }
    for option, (default, what) in numbers.items():
        text = f"{what} [default: {default}]"
        parser.add_argument(option, type=int, default=default, metavar="N", help=text)


def _counts(text: str) -> tuple[int, ...]:
    given = tuple(int(one) for one in text.split(",") if one.isascii() and one.isdecimal())
    if not given or min(given) < 1 or len(given) <= text.count(",") or len({*given}) < len(given):
        raise ArgumentTypeError(f"{text!r} must list different numbers, for example 1,2,4,8")
    return given


def measure(args: Namespace, console: Console) -> Measured:
    config, talks = read_arguments(args)
    rows = asyncio.run(_measure(args, config, talks, console))
    return figures(rows), rows


def read_arguments(args: Namespace) -> tuple[TrainConfig, list[Talk]]:
    """Return the engine's config, and all conversations. Raise ValueError for numbers that a run
    would refuse."""
    check_counts(args, "slots", "tokens", "wait", "answers", "laps")
    longest = TURNS * (3 * args.tokens // 2) + (TURNS - 1) * OBSERVED_TOKENS + 1
    overrides = (
        f"environment.path={TOOL}",
        f"environment.max_turns={TURNS}",
        f"data.max_response_tokens={longest}",
        f"rollout.max_num_seqs={args.slots}",
        "reward.type=environment",
        "rollout.num_engines=1",
        "drafting.enabled=false",
    )
    config = load_config(args.config, overrides)
    try:
        check_engine_fits(config)
    except ValueError as error:
        raise ValueError(f"--tokens {args.tokens}: give fewer, because {error}") from error
    prompts = read_inputs(config).datasets[Split.TRAIN].prompts
    number = max(args.conversations) * args.slots
    return config, make_talks(prompts, number, args.tokens, config.seed)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return medians over laps, and ratios of laps that ran one after the other."""
    (answers,) = rows_with(rows, kind="answers")
    found: dict[str, float] = {"answers_per_s": answers["answers"] / answers["seconds"]}
    whole = rows_with(rows, kv="")
    for number in dict.fromkeys(row["conversations"] for row in whole):
        laps = [rows_with(whole, conversations=number, kind=kind) for kind in KINDS]
        groups = [_compared(*group) for group in zip(*laps, strict=True)]
        found |= {f"{name}_{number}": median(one[name] for one in groups) for name in groups[0]}
    tools = rows_with(rows, kind="tools")
    shares: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for row in (answers, *rows_with(rows, kind="instant"), *tools):
        kind = row["kind"], row.get("conversations"), row.get("kv")
        shares[kind].append(row["journal_s"] / row["seconds"])
    found["journal_share"] = max(map(median, shares.values()))
    found["identical"] = min(row["identical"] for row in tools)
    for end in dict.fromkeys(row["kv"] for row in tools):
        own = rows_with(tools, kv=end)
        most = rows_with(own, conversations=max(row["conversations"] for row in own))
        found[f"cached_share{end}"] = median(row["num_cached"] / row["num_full"] for row in most)
        found[f"kv_bytes{end}"] = most[0]["kv_bytes"]
    return found


def _compared(without: Row, instant: Row, tools: Row) -> dict[str, float]:
    return {
        "slots_in_use": tools["in_use"] / max(without["in_use"], instant["in_use"]),
        "seconds": tools["seconds"] / instant["seconds"],
        "instant_seconds": instant["seconds"] / without["seconds"],
        "wait_over_turn": tools["tool_s"] / tools["turn_s"],
    }


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("a slot", "KV MB", "kind", "in use", "s", "turn s", "tool s", "cached")
    for row in report.rows:
        if row["kind"] in KINDS:
            full = row["num_full"]
            table.add_row(
                str(row["conversations"]),
                f"{row['kv_bytes'] / 1e6:.0f}",
                row["kind"],
                f"{row['in_use']:.2f}",
                f"{row['seconds']:.1f}",
                *(f"{row[name]:.2f}" for name in ("turn_s", "tool_s")),
                f"{row['num_cached'] / full:.0%}" if full else "",
            )
    console.print(table)
    for name, value in report.figures.items():
        console.print(f"{name}: {value:,.2f}")


async def _measure(
    args: Namespace, config: TrainConfig, talks: Sequence[Talk], console: Console
) -> list[Row]:
    wanted = Wanted("an engine", config.rollout.tp_degree, "a GPU, where there is one")
    with ray_cluster("tools", [wanted]) as placement:
        num_gpus = config.rollout.tp_degree if placement.num_gpus else 0
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(TemporaryDirectory()))
            stack.callback(ray.kill, start_store(directory / "tools.duckdb", STORE))
            await start_environments(config, stack, placement, STORE)
            rows = [await _answers(config, talks, args.answers)]
            for end, share in KV_SHARES.items():
                num_tokens = kv_tokens(talks, share, config.max_model_len)
                size = num_tokens * model_shape(config).kv_bytes_per_token
                rollout = config.rollout.model_copy(update={"kv_cache_bytes": size})
                own = config.model_copy(update={"rollout": rollout})
                console.print(f"starting an engine with {size / 1e6:.0f} MB for keys and values")
                async with _engine(own, num_gpus) as engine:
                    numbers = sorted(args.conversations * args.laps)
                    for number in numbers if share == 1.0 else numbers[-1:]:
                        laps = await engine.laps(talks[: number * args.slots], args.wait / 100)
                        about = {"conversations": number, "kv": end, "kv_bytes": size}
                        rows += [about | lap for lap in laps]
                        seconds = ", ".join(f"{lap['kind']} {lap['seconds']:.1f} s" for lap in laps)
                        console.print(f"{number} conversations a slot: {seconds}")
    return rows


@dataclass(frozen=True)
class _Conversing:
    """An engine and its coordinator."""

    config: TrainConfig
    engine: RayEngine
    coordinator: Coordinator

    async def laps(self, talks: Sequence[Talk], wait_over_turn: float) -> list[Row]:
        """Return the rows of one lap of each kind."""
        without, instant = await self._lap(talks, None), await self._lap(talks, 0.0)
        tools = await self._lap(talks, wait_over_turn * instant[0].turn_s / MEAN_TOOL_S)
        found = zip(KINDS, (without, instant, tools), strict=True)
        rows = [{"kind": kind, **lap.row(), "journal_s": s} for kind, (lap, s) in found]
        rows[-1]["identical"] = tools[0].share_identical(instant[0])
        return rows

    async def _lap(self, talks: Sequence[Talk], scale: float | None) -> tuple[TalkLap, float]:
        """Return a lap, and the seconds that the store spent on the journal in it."""
        client = _client(self.config)
        before_s = await client.journal_s()
        requests = [talk.request(self.config, scale) for talk in talks]
        await wait_for(self.engine.actor.converse.remote(scale is not None), CALL_S)
        await wait_for(self.engine.actor.take_usage.remote(), CALL_S)
        todo = [(0, request) for request in requests]
        lap = await one_step.roll_out(self.coordinator, AS_IT_IS, todo)
        usage = await wait_for(self.engine.actor.take_usage.remote(), CALL_S)
        _check(
            lap.rollouts, {request.id: talk for request, talk in zip(requests, talks, strict=True)}
        )
        if scale is not None:
            await client.finished([request.id for request in requests])
        journal_s = await client.journal_s() - before_s
        return TalkLap(lap.rollouts, usage, self.config.rollout.max_num_seqs), journal_s


def _check(rollouts: Sequence[Rollout], talks: dict[RequestId, Talk]) -> None:
    """Check that each conversation has all of its turns and tokens."""
    assert {rollout.id for rollout in rollouts} == talks.keys()
    for rollout in rollouts:
        lengths = talks[rollout.id].turn_tokens
        turns = tuple(turn.num_sampled for turn in rollout.generated.turns)
        assert rollout.num_tokens == sum(lengths), f"{rollout.id}: {rollout.num_tokens} tokens"
        assert turns in ((), lengths), f"{rollout.id}: turns of {turns}, not {lengths}"


@asynccontextmanager
async def _engine(config: TrainConfig, num_gpus: int) -> AsyncGenerator[_Conversing]:
    engine = RayEngine(0, config.engine, num_gpus, TurnEngine)
    coordinator = Coordinator([engine])
    try:
        await coordinator.start()
        yield _Conversing(config, engine, coordinator)
    finally:
        await coordinator.shutdown()


async def _answers(config: TrainConfig, talks: Sequence[Talk], number: int) -> Row:
    """Time this many answers of the actor, asked for as an engine does."""
    client, free = _client(config), asyncio.Semaphore(AT_ONCE)

    async def converse(step: int) -> None:
        async with free:
            talk = talks[step % len(talks)]
            request = talk.request(config, 0.0)
            request = replace(request, id=replace(request.id, step=step))
            for num_tokens in talk.turn_tokens:
                request = await _answered(client, request, num_tokens)
            await client.finished([request.id])

    await asyncio.gather(*(converse(-1 - step) for step in range(WARM_UP)))
    num_talks = -(-number // TURNS)
    before_s, began_s = await client.journal_s(), time.perf_counter()
    await asyncio.gather(*(converse(step) for step in range(num_talks)))
    seconds = time.perf_counter() - began_s
    journal_s = await client.journal_s() - before_s
    found = {"answers": num_talks * TURNS, "seconds": seconds, "journal_s": journal_s}
    return {"kind": "answers", **found}


async def _answered(
    client: EnvironmentClient, request: RolloutRequest, num_tokens: int
) -> RolloutRequest:
    """Return a conversation with one more turn, made of the prompt's tokens, and its answer."""
    before, prompt = request.generated or NOTHING, request.prompt_token_ids
    sampled = (prompt * (1 + num_tokens // len(prompt)))[:num_tokens]
    turn = with_turn(replace(before, token_ids=[*before.token_ids, *sampled]))
    answer = await client.answer(replace(request, generated=turn))
    assert not answer.failed, "the actor has failed"
    return replace(request, generated=answered(turn, answer))


def _client(config: TrainConfig) -> EnvironmentClient:
    assert config.environment is not None
    return EnvironmentClient(config.environment)
