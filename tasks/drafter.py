"""Make a draft head: generate responses of a model, and train the head on them."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from refrain.engines.draft_head.model import DraftHead, draft_vocabulary
from refrain.engines.draft_head.training import Agreement
from refrain.engines.inference.engine.checkpoint_engine import CheckpointEngine
from refrain.engines.inference.engine.in_process import InProcessEngine
from refrain.engines.learn.head_training import HeadTraining, draw_sequences
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.packing import MicroBatch, TokenSequence, pack
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.sample_isolation import keeps_samples_apart
from refrain.engines.machine.cuda import works_on_cpu
from refrain.schemas.config import EngineConfig, TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.keys import sample_key
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.run.model_inputs import model_shape

LEARNING_RATE = 1e-3
UPDATE_TOKENS = 1024
"""Tokens of an update, prompts included, or those of the longest sample. Whole distributions as
targets make the gradient of so few tokens good enough."""
HELD_OUT_TOKENS = 8192
"""Most tokens of held-out samples that agreement is measured on, prompts included."""
CPU_KV_BYTES = 2 * 2**30
"""Largest KV cache on a CPU."""
NUM_REPORTS = 10
"""Reports on the progress of training."""
Report = Callable[[str], None]


class TrainedHead(NamedTuple):
    """A draft head, and its agreement with the policy on held-out samples before and after."""

    head: DraftHead
    before: Agreement
    after: Agreement


class _Engine(CheckpointEngine, InProcessEngine):
    """An engine beside this code that serves the weights of a model directory."""


async def roll_out(
    config: TrainConfig, prompts: Sequence[Prompt], report: Report
) -> list[TokenSequence]:
    """Return `group_size` responses of the model to each prompt, in the order of the prompts."""
    report(f"starting vLLM for {len(prompts):,} prompts")
    engine = _Engine(0, _engine_config(config))
    await engine.start()
    try:
        await engine.load_weights(PolicyWeights(0, None, ()))
        found: list[TokenSequence] = []
        size = config.prompts_per_step
        for first in range(0, len(prompts), size):
            own = prompts[first : first + size]
            found += map(_sequence, await engine.generate(_requests(config, own)))
            num_tokens = sum(one.num_response_tokens for one in found)
            report(f"prompt {first + len(own):,}/{len(prompts):,}: {num_tokens:,} tokens")
        return found
    finally:
        await engine.shutdown()


def _engine_config(config: TrainConfig) -> EngineConfig:
    """Return the engine's config. On a CPU its KV cache has room for all requests, if possible."""
    engine = config.engine
    if not works_on_cpu():
        return engine
    num_tokens = engine.rollout.max_num_seqs * engine.max_model_len
    num_bytes = min(CPU_KV_BYTES, int(num_tokens * model_shape(config).kv_bytes_per_token))
    rollout = engine.rollout.model_copy(update={"kv_cache_bytes": num_bytes})
    return engine.model_copy(update={"rollout": rollout})


def _requests(config: TrainConfig, prompts: Sequence[Prompt]) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            id=RequestId(Split.TRAIN, 1, prompt.key, i),
            prompt_token_ids=prompt.token_ids,
            sample_key=sample_key(config.seed, 1, Split.TRAIN, prompt.key, i),
            max_response_tokens=config.data.max_response_tokens,
        )
        for prompt in prompts
        for i in range(config.rollout.group_size)
    ]


def _sequence(rollout: Rollout) -> TokenSequence:
    prompt = rollout.request.prompt_token_ids
    return TokenSequence(np.array([*prompt, *rollout.generated.token_ids], np.int32), len(prompt))


def train_head(
    config: TrainConfig,
    sequences: Sequence[TokenSequence],
    held_out: Sequence[TokenSequence],
    *,
    num_updates: int,
    depth: int,
    report: Report,
) -> TrainedHead:
    """Train a new head on `sequences`, and measure it on `held_out`. Raise RuntimeError when a
    batch has nothing to draft, or its loss is not finite."""
    policy = _load(config)
    budget = max([UPDATE_TOKENS, *(one.num_input_tokens for one in (*sequences, *held_out))])
    batches = pack(sequences, budget, alone=policy.alone)
    hidden_size = policy.model.config.get_text_config().hidden_size
    training = HeadTraining(
        DraftHead(hidden_size, draft_vocabulary([one.targets for one in batches])),
        policy,
        config.rollout.temperature,
        depth=depth,
        learning_rate=LEARNING_RATE,
        num_updates=num_updates,
        keeps_hidden=True,
    )
    measured, _ = draw_sequences(held_out, HELD_OUT_TOKENS, (config.seed,))
    tests = pack(measured, budget, alone=policy.alone)
    training.set_scale(batches[0])
    before = training.agreement(tests)
    rows = zip(range(1, num_updates + 1), _shuffled(batches, config.seed), strict=False)
    for update, batch in rows:
        if (loss := training.update(batch)) is None:
            raise RuntimeError(
                f"update {update} is not possible: its responses have one token each, or its loss "
                "is not finite. Look at the responses of this model, and give --dtype float32"
            )
        if update % math.ceil(num_updates / NUM_REPORTS) == 0:
            report(f"update {update:,}/{num_updates:,}: loss {loss:.3f}")
    return TrainedHead(training.head, before, training.agreement(tests))


def _load(config: TrainConfig) -> PolicyModel:
    dtype = getattr(torch, config.model.dtype)
    loading = Loading(
        torch.device("cpu" if works_on_cpu() else "cuda"),
        dtype=dtype,
        compute_dtype=dtype,
        trust_remote_code=config.model.trust_remote_code,
        max_tokens=config.max_model_len,
    )
    policy = load_policy(config.model.path, loading)
    policy.alone = not keeps_samples_apart(policy, dtype)
    return policy


def _shuffled(batches: Sequence[MicroBatch], seed: int) -> Iterator[MicroBatch]:
    """Yield the batches again and again, each time in another order."""
    rng = np.random.default_rng(seed)
    while True:
        yield from (batches[at] for at in rng.permutation(len(batches)))
