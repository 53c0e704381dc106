"""Requests of one step on real engines, and their finished rollouts with tokens."""

import time
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.stage import Outcome
from refrain.engines.store.rows import from_stream
from refrain.schemas.config import TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.keys import sample_key
from refrain.schemas.rollout import (
    FinishedRollout,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    Split,
    Turn,
    VersionSpan,
)
from refrain.schemas.weights import PolicyWeights

PACKAGES = ("refrain-rl", "torch", "ray", "vllm")
_NUM_CANARIES = 4
_COUNTS = ("num_draft_tokens", "num_accepted_tokens", "num_verifications")


@dataclass(frozen=True)
class Lap:
    """One rollout of the step."""

    seconds: float
    rollouts: Sequence[Rollout]
    outcome: Outcome

    @property
    def tokens(self) -> dict[RequestId, Sequence[int]]:
        return {rollout.id: rollout.generated.token_ids for rollout in self.rollouts}

    @property
    def counts(self) -> dict[str, int]:
        """Number of tokens, of draft tokens, and of verifications."""
        generated = [rollout.generated for rollout in self.rollouts]
        sums = {name: sum(getattr(one, name) for one in generated) for name in _COUNTS}
        return {"num_tokens": sum(rollout.num_tokens for rollout in self.rollouts), **sums}


def add_arguments(parser: ArgumentParser, config: str) -> None:
    """Add CONFIG with this default, --prompts and --laps."""
    add_config(parser, config)
    parser.add_argument(
        "--prompts", type=int, default=32, metavar="N", help="prompts of the step [default: 32]"
    )
    parser.add_argument(
        "--laps", type=int, default=3, metavar="N", help="laps of each mode [default: 3]"
    )


def add_config(parser: ArgumentParser, config: str) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        type=Path,
        default=Path(config),
        help=f"[default: {config}]",
    )


def first_weights(config: TrainConfig, canaries: Sequence[Sequence[int]]) -> PolicyWeights:
    """Return the weights of version 0, with canaries of these tokens."""
    from refrain.engines.learn.learner import Learner

    learner = Learner(config)
    learner.restore(None)
    return PolicyWeights(0, learner.weights_buffer(), learner.canaries(canaries))


def first_step(config: TrainConfig, num_prompts: int) -> tuple[PolicyWeights, list[RolloutRequest]]:
    """Return the weights of version 0 with canaries, and a group for each of the first prompts."""
    from refrain.tasks.run.preflight import read_inputs

    prompts = read_inputs(config).datasets[Split.TRAIN].prompts[:num_prompts]
    weights = first_weights(config, [prompt.token_ids for prompt in prompts[:_NUM_CANARIES]])
    return weights, step_requests(config, prompts)


def step_requests(
    config: TrainConfig, prompts: Iterable[Prompt], step: int = 1
) -> list[RolloutRequest]:
    """Return a group of requests for each prompt."""
    return [
        RolloutRequest(
            id=RequestId(Split.TRAIN, step, prompt.key, i),
            prompt_token_ids=prompt.token_ids,
            sample_key=sample_key(config.seed, step, Split.TRAIN, prompt.key, i),
            max_response_tokens=config.data.max_response_tokens,
        )
        for prompt in prompts
        for i in range(config.rollout.group_size)
    ]


async def roll_out(
    coordinator: Coordinator,
    weights: PolicyWeights,
    assignments: Sequence[tuple[int, RolloutRequest]],
) -> Lap:
    """Roll out with empty prefix caches. The time for loading weights does not count."""
    await coordinator.load_weights(weights)
    told: list[FinishedRollout] = []

    async def keep(finished: Sequence[FinishedRollout]) -> None:
        told.extend(finished)

    started_s = time.perf_counter()
    outcome = await coordinator.roll_out(assignments, keep)
    seconds = time.perf_counter() - started_s
    return Lap(seconds, await fetch(told), outcome)


async def fetch(finished: Sequence[FinishedRollout]) -> list[Rollout]:
    """Return the same rollouts with their tokens, in order. Their requests lack the key of the
    noise."""
    tables = {id(rollout.rows): rollout.rows for rollout in finished}
    rows = {key: from_stream(await reference).to_pylist() for key, reference in tables.items()}
    return [_fetched(rollout, rows[id(rollout.rows)][rollout.row]) for rollout in finished]


def _fetched(told: FinishedRollout, row: dict) -> Rollout:
    generated = Generated(
        token_ids=row["response_token_ids"],
        inference_logprobs=row["inference_logprobs"],
        spans=tuple(VersionSpan(**span) for span in row["version_spans"]),
        turns=tuple(Turn(**turn) for turn in row["turns"]),
        score=row["environment_score"],
        **{name: row[name] for name in _COUNTS},
    )
    num_tokens = len(generated.token_ids)
    assert num_tokens == told.num_tokens + told.num_observed
    return Rollout(
        request=RolloutRequest(told.id, tuple(row["prompt_token_ids"]), 0, num_tokens),
        generated=generated,
        finish_reason=told.finish_reason,
        engine=told.engine,
        started_s=row["started_s"],
        finished_s=row["finished_s"],
        num_cached_tokens=told.num_cached_tokens,
    )
