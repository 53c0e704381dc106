"""Configuration, requests and rollouts for tests on real vLLM engines."""

import asyncio
import hashlib
from collections.abc import Sequence

from refrain.benchmarks.one_step import fetch
from refrain.engines.learn.learner import Learner
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.moves import moves_long
from refrain.schemas.config import TrainConfig
from refrain.schemas.keys import sample_key
from refrain.schemas.rollout import FinishedRollout, RequestId, Rollout, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights
from tests.conftest import DEMO

CONFIG = TrainConfig.model_validate(
    {
        "model": {"path": str(DEMO / "model"), "dtype": "float32"},
        "data": {
            "train": [str(DEMO / "data" / "train.parquet")],
            "max_prompt_tokens": 128,
            "max_response_tokens": 256,
        },
        "rollout": {"num_engines": 2},
        "specactor": {
            "draft_models": [{"name": "small", "path": str(DEMO / "drafter")}],
        },
    }
)


def weights_of(learner: Learner, prompts: Sequence[tuple[int, ...]]) -> PolicyWeights:
    return PolicyWeights(
        learner.policy_version, learner.weights_buffer(), learner.canaries(prompts[:4])
    )


def key(i: int) -> str:
    return hashlib.blake2b(b"%d" % i, digest_size=16).hexdigest()


def requests(
    prompts: Sequence[tuple[int, ...]], seed: int = 0, group_size: int = 4
) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            id=RequestId(Split.TRAIN, 1, key(i), j),
            prompt_token_ids=prompt,
            sample_key=sample_key(seed, 1, "train", f"prompt-{i}", j),
            max_response_tokens=CONFIG.data.max_response_tokens,
        )
        for i, prompt in enumerate(prompts)
        for j in range(group_size)
    ]


async def roll_out(
    engines,
    weights,
    assignments,
    policies=(),
    on_progress=None,
    pools=(),
    moves_kv=moves_long,
    timeout_s=300.0,
):
    """Run a stage on the engines. Return the rollouts by request id, and the outcome."""
    coordinator = Coordinator(engines, policies, pools=pools)
    await coordinator.load_weights(weights)
    told: list[FinishedRollout] = []

    async def keep(rollouts):
        told.extend(rollouts)

    stage = coordinator.roll_out(assignments, keep, on_progress, moves_kv=moves_kv)
    outcome = await asyncio.wait_for(stage, timeout_s)
    # Wait for engines that are restarting: the next test needs them.
    await coordinator.load_weights(weights)
    finished = {rollout.id: rollout for rollout in await fetch(told)}
    assert len(finished) == len(told)
    return finished, outcome


def tokens_of(finished: dict[RequestId, Rollout]) -> dict[RequestId, Sequence[int]]:
    return {id: rollout.generated.token_ids for id, rollout in finished.items()}
