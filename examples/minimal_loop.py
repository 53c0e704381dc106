"""The algorithm in one file, to copy and change: no Prefect, no Ray, no store, no scorer processes.

    prompts ─► engine (vLLM): rollouts ─► rewards ─► advantages ─► loss ─► AdamW ─┐
                 ▲    ▲                      │                                    │
                 │    └── drafts ◄─ history ◄┘                                    │
                 └───────────────── weights ◄─────────────────────────────────────┘

    .venv/bin/python examples/minimal_loop.py

trains the shipped model on a CPU in about two minutes. Each step prints a line:

    reward    mean over the step's responses: it rises
    accepted  draft tokens that were accepted / drafted: 0 until the prompts come back
    differ    mean |trainer - engine| log-probability of a token: about 1e-6 in float32
    tokens    digest of all responses: `--drafter none` gives the same ones, more slowly
"""

import asyncio
import os
import random
import tempfile
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from refrain.engines.answers.builtin import compute_score
from refrain.engines.data.dataset import load_dataset, load_tokenizer
from refrain.engines.histospec.library import IndexLibrary, PromptHistory
from refrain.engines.inference.engine.in_process import InProcessEngine
from refrain.engines.learn.advantages import group_relative_advantage
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.objectives.clipped import clipped_policy_losses
from refrain.engines.learn.packing import TokenSequence, pack
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.training_state import host_tensors
from refrain.schemas.config import EngineConfig, RolloutConfig
from refrain.schemas.data import Prompt
from refrain.schemas.drafting import HISTORY, TEXT_DRAFTERS, DraftingConfig, SpecActorConfig
from refrain.schemas.inputs import ModelConfig
from refrain.schemas.keys import sample_key
from refrain.schemas.rollout import DraftSetting, RequestId, Rollout, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights

DEMO = Path(__file__).parent.parent / "infra" / "demo"
MICRO_BATCH_TOKENS = 8192
NONE = "none"
WINDOW = 4
"""Draft tokens per verification, of drafters other than history."""


async def train(args: Namespace, index_dir: Path) -> None:
    tokenizer = load_tokenizer(args.model)
    prompts = load_dataset([args.data], tokenizer, args.max_prompt_tokens).prompts
    engine = InProcessEngine(0, engine_config(args, index_dir))
    await engine.start()
    history = IndexLibrary(index_dir, DraftingConfig())
    policy = load_policy(args.model, Loading(torch.device(args.device)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)

    batches = batches_of(prompts[: args.max_prompts], args.prompts_per_step, args.seed)
    for step, batch in zip(range(1, args.steps + 1), batches, strict=False):
        started_s = time.perf_counter()
        await engine.load_weights(weights_of(policy, step - 1, args.dtype))
        rollouts = await engine.generate(requests_of(batch, step, args))
        size = args.group_size
        groups = [rollouts[at : at + size] for at in range(0, len(rollouts), size)]
        rewards = [
            [reward_of(prompt, one, tokenizer) for one in group]
            for prompt, group in zip(batch, groups, strict=True)
        ]
        advantages = [advantage for group in rewards for advantage in advantages_of(group)]
        difference = update(policy, optimizer, rollouts, advantages)
        history.add(list(map(history_of, groups, rewards)))
        report(step, rollouts, rewards, difference, time.perf_counter() - started_s)
    await engine.shutdown()


def batches_of(prompts: Sequence[Prompt], size: int, seed: int) -> Iterator[list[Prompt]]:
    """Yield the prompts of each step, without end. Each epoch has its own order."""
    rng = random.Random(seed)
    while True:
        epoch = rng.sample(prompts, len(prompts))
        yield from (epoch[at : at + size] for at in range(0, len(epoch), size))


def requests_of(batch: Sequence[Prompt], step: int, args: Namespace) -> list[RolloutRequest]:
    """Return `group_size` requests for each prompt. The key of its noise decides a sample's tokens,
    whatever drafts there are."""
    from_text = args.drafter in TEXT_DRAFTERS
    return [
        RolloutRequest(
            id=RequestId(Split.TRAIN, step, prompt.key, index),
            prompt_token_ids=prompt.token_ids,
            sample_key=sample_key(args.seed, step, Split.TRAIN, prompt.key, index),
            max_response_tokens=args.max_response_tokens,
            drafting=DraftSetting(args.drafter, WINDOW) if from_text else None,
        )
        for prompt in batch
        for index in range(args.group_size)
    ]


def reward_of(prompt: Prompt, rollout: Rollout, tokenizer: Any) -> float:
    """Return 1 for a right answer and 0 for a wrong one: put your own reward here."""
    response = tokenizer.decode(rollout.generated.token_ids, skip_special_tokens=True)
    return compute_score(prompt.data_source, response, prompt.ground_truth)["score"]


def advantages_of(rewards: Sequence[float]) -> list[float]:
    """Return GRPO's advantages of a group: put your own estimator here."""
    group = np.array(rewards)
    return [group_relative_advantage(one, group, normalise_by_std=True) for one in rewards]


def update(
    policy: PolicyModel,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
) -> float:
    """Make one update: the clipped policy gradient, averaged over all tokens of the step.

    Return the mean |trainer - engine| log-probability before the update. Both have the same
    weights, so a large one means that one of them computes something else."""
    sequences = [sequence_of(rollout) for rollout in rollouts]
    num_tokens = sum(rollout.num_tokens for rollout in rollouts)
    difference = 0.0
    optimizer.zero_grad()
    for batch in pack(sequences, MICRO_BATCH_TOKENS):
        logprobs = policy.score(batch, temperature=1.0).logprobs
        own = [rollouts[at].generated.inference_logprobs for at in batch.samples]
        engine_logprobs = torch.tensor(np.concatenate(own)).to(logprobs)
        lengths = [rollouts[at].num_tokens for at in batch.samples]
        repeated = np.repeat([advantages[at] for at in batch.samples], lengths)
        log_ratios = logprobs - engine_logprobs
        losses = clipped_policy_losses(
            log_ratios, torch.tensor(repeated).to(logprobs), clip_low=0.2, clip_high=0.2
        )
        (losses.sum() / num_tokens).backward()
        difference += log_ratios.detach().abs().sum().item() / num_tokens
    torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm=1.0)
    optimizer.step()
    return difference


def sequence_of(rollout: Rollout) -> TokenSequence:
    prompt = rollout.request.prompt_token_ids
    return TokenSequence(np.array([*prompt, *rollout.generated.token_ids], np.int32), len(prompt))


def weights_of(policy: PolicyModel, policy_version: int, dtype: str) -> PolicyWeights:
    """Return the weights for the engine, which checks that each of its layers takes some."""
    tensors = host_tensors(policy, getattr(torch, dtype), keep=True)
    return PolicyWeights(policy_version, safetensors.torch.save(tensors), canaries=())


def history_of(group: Sequence[Rollout], rewards: Sequence[float]) -> PromptHistory:
    """Return what the next epoch drafts from, for one prompt."""
    request = group[0].request
    responses = [rollout.generated.token_ids for rollout in group]
    key, step = request.id.prompt_key, request.id.step
    return PromptHistory(key, step, request.prompt_token_ids, responses, rewards)


def report(
    step: int,
    rollouts: Sequence[Rollout],
    rewards: Sequence[Sequence[float]],
    difference: float,
    seconds: float,
) -> None:
    drafted = sum(rollout.generated.num_draft_tokens for rollout in rollouts)
    accepted = sum(rollout.generated.num_accepted_tokens for rollout in rollouts)
    digest = blake2b(b"".join(rollout.token_digest for rollout in rollouts), digest_size=4)
    print(
        f"step {step:3}  reward {np.mean(rewards):.3f}  accepted {accepted}/{drafted}  "
        f"differ {difference:.0e}  tokens {digest.hexdigest()}  {seconds:.1f} s",
        flush=True,
    )


def engine_config(args: Namespace, index_dir: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=args.model, dtype=args.dtype),
        # On a GPU the policy and its optimizer need memory, too.
        rollout=RolloutConfig(gpu_memory_utilization=0.4),
        max_model_len=args.max_prompt_tokens + args.max_response_tokens,
        drafting=DraftingConfig(enabled=args.drafter == HISTORY),
        specactor=SpecActorConfig(drafter=HISTORY if args.drafter == NONE else args.drafter),
        history_dir=index_dir,
    )


def parse() -> Namespace:
    parser = ArgumentParser(
        description="Train a model with GRPO, in one process and one engine.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--model", type=Path, default=DEMO / "model", help="Hugging Face directory")
    add("--data", type=Path, default=DEMO / "data" / "train.parquet", help="prompts, as veRL's")
    add("--steps", type=int, default=10, help="policy updates")
    add("--max-prompts", type=int, default=128, help="use only the first prompts of the file")
    add("--prompts-per-step", type=int, default=32, help="prompts of one update")
    add("--group-size", type=int, default=8, help="responses to each prompt")
    add("--max-prompt-tokens", type=int, default=128, help="longest prompt")
    add("--max-response-tokens", type=int, default=256, help="longest response")
    add("--learning-rate", type=float, default=5e-4, help="AdamW's; 1e-6 for a model of 1B")
    add("--seed", type=int, default=0, help="seed of the order and of the samples")
    add("--dtype", default="bfloat16" if gpu else "float32", help="the engine's data type")
    add("--device", default="cuda" if gpu else "cpu", help="where the policy trains")
    add("--drafter", choices=(HISTORY, *TEXT_DRAFTERS, NONE), default=HISTORY, help="who drafts")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(train(parse(), Path(directory)))
