"""Stand-ins for engines, which make up tokens, and a run for them."""

import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from refrain.schemas.config import TrainConfig
from refrain.schemas.counts import DraftingCounts
from refrain.schemas.data import Prompt
from refrain.schemas.rollout import FinishReason, Generated, Rollout, RolloutRequest, VersionSpan
from refrain.schemas.weights import PolicyWeights

MODEL = Path("infra/demo/model")
NUM_ENGINES = 2
GROUP_SIZE = 8
PROMPT_TOKENS = 64
_STEP_COSTS = (1e-2, 1e-4, 1e-4, 1e-8, 1e-4, 1e-5)
"""Seconds that an engine claims to have measured. They determine the savings of drafts."""


class MadeUpEngine:
    """An engine without events. Subclasses add them and set the pace."""

    tp_degree = 1
    node_id = None

    def __init__(self, index: int, num_words: int) -> None:
        """`num_words`: token ids are below it."""
        self.index = index
        self._num_words = num_words
        self._queue: list[RolloutRequest] = []
        self._version = 0
        self._rng = np.random.default_rng(index)

    async def start(self) -> None: ...

    async def shutdown(self) -> None:
        self._queue.clear()

    async def load_weights(self, weights: PolicyWeights) -> float:
        self._version = weights.policy_version
        return 0.0

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._queue += requests

    async def take_drafting_counts(self) -> DraftingCounts:
        return DraftingCounts(num_steps=1, num_drafting_steps=1, step_costs=_STEP_COSTS)

    def _finish(self, num: int, shortest: float = 1.0) -> list[Rollout]:
        """Finish the next requests. Responses have at least this share of the most tokens."""
        done, self._queue = self._queue[:num], self._queue[num:]
        return [self._rollout(request, shortest) for request in done]

    def _rollout(self, request: RolloutRequest, shortest: float) -> Rollout:
        most = request.max_response_tokens
        num_tokens = int(self._rng.integers(int(shortest * most), most + 1))
        tokens = self._rng.integers(0, self._num_words, num_tokens).astype(np.int32)
        generated = Generated(
            token_ids=array("i", tokens.tobytes()),
            inference_logprobs=array("f", [-1.0]) * num_tokens,
            spans=(VersionSpan(self._version, num_tokens),),
            num_draft_tokens=num_tokens,
            num_accepted_tokens=int(self._rng.integers(0, num_tokens)),
            num_verifications=num_tokens // 2,
        )
        reason = FinishReason.LENGTH if num_tokens == most else FinishReason.STOP
        now_s = time.time()
        return Rollout(request, generated, reason, self.index, now_s - 1.0, now_s)


def made_up_config(runs_dir: Path, name: str, num_rollouts: int, num_tokens: int) -> TrainConfig:
    """Return the config of a run whose steps have this many rollouts of up to this many tokens."""
    return TrainConfig.model_validate(
        {
            "name": name,
            "runs_dir": runs_dir,
            "prompts_per_step": num_rollouts // GROUP_SIZE,
            "model": {"path": MODEL},
            "data": {
                "train": ["none"],
                "max_prompt_tokens": PROMPT_TOKENS,
                "max_response_tokens": num_tokens,
            },
            "rollout": {"num_engines": NUM_ENGINES, "group_size": GROUP_SIZE},
            "drafting": {"enabled": False},
            "trainer": {
                "micro_batch_tokens": PROMPT_TOKENS + num_tokens,
                "save_every_steps": 10_000,
            },
        }
    )


def made_up_prompts(config: TrainConfig, num_words: int) -> dict[str, Prompt]:
    """Return the prompts of a step, by key."""
    rng = np.random.default_rng(0)
    keys = [f"{i:032x}" for i in range(config.prompts_per_step)]
    return {
        key: Prompt(key, tuple(rng.integers(0, num_words, PROMPT_TOKENS).tolist()), "math", "7")
        for key in keys
    }
