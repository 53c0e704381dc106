"""Load right and wrong weights into a real engine with a real model, and record the canaries.

    python -m tests.inference.smollm2 MODEL FILE

The engine runs in bfloat16. For each case, FILE gets the canaries' log-probabilities of the trainer
in float32 and in bfloat16, those of the engine, and the engine's message. `smollm2.json` in this
folder is such a file.

With a learning rate of 1e-5, a step changes few weights by enough for bfloat16, so no difference of
log-probabilities shows it. A step with 1e-3 shows clearly. The engine notices a layer that received
no weights in any case.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.inference.weights.canary import engine_logprobs
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.packing import TokenSequence, pack
from refrain.engines.rollout.interface import WeightSyncError
from refrain.schemas.config import TrainConfig
from refrain.schemas.weights import Canary, PolicyWeights

NUM_CANARIES, NUM_TOKENS = 4, 128
QUESTIONS = (
    "What is 48 + 17 - 9?",
    "Tom has 31 apples, buys 12 more and eats 5. How many are left? Explain.",
    "Write a short story about seven cats.",
    "List the steps to divide 91 by 7.",
)
LAYER = 15
EMBEDDING = "model.embed_tokens.weight"
Tensors = Mapping[str, Tensor]


def config_of(model_dir: Path) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": str(model_dir), "dtype": "bfloat16"},
            "data": {"train": ["unused"], "max_prompt_tokens": 128, "max_response_tokens": 128},
            "rollout": {"num_engines": 1, "max_num_seqs": 8},
            "trainer": {"micro_batch_tokens": 1024},
            "drafting": {"enabled": False},
        }
    )


def sampled(model_dir: Path) -> list[list[int]]:
    """Return questions with responses that the model sampled at temperature 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    torch.manual_seed(0)
    sequences = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        given = {"do_sample": True, "max_length": NUM_TOKENS, "min_length": NUM_TOKENS}
        drawn = model.generate(torch.tensor([ids]), pad_token_id=0, **given)
        sequences.append(drawn[0].tolist())
    return sequences


class Policy:
    """The trainer's policy. Tests can change its parameters for a while."""

    def __init__(self, config: TrainConfig, sequences: Sequence[Sequence[int]]) -> None:
        self._learner = Learner(config)
        self._learner.restore(None)
        self._model = self._learner._policy.model
        self._sequences = sequences
        self.start = safetensors.torch.load(self._learner.weights_buffer())

    def canaries(self) -> tuple[Canary, ...]:
        return self._learner.canaries(self._sequences)

    @torch.no_grad()
    def hold(self, tensors: Tensors) -> None:
        """Set these parameters. The head stays tied to the embeddings."""
        own = dict(self._model.named_parameters())
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    def canaries_of(self, tensors: Tensors) -> tuple[Canary, ...]:
        self.hold(tensors)
        found = self.canaries()
        self.hold(self.start)
        return found

    def canaries_with_head(self, head: Tensor) -> tuple[Canary, ...]:
        """Return canaries of a model with this head instead of the tied one."""
        tied = self._model.lm_head.weight
        self._model.lm_head.weight = torch.nn.Parameter(head.float())
        found = self.canaries()
        self._model.lm_head.weight = tied
        return found

    def canaries_with_epsilon(self, epsilon: float) -> tuple[Canary, ...]:
        norms = [one for one in self._model.modules() if hasattr(one, "variance_epsilon")]
        before = norms[0].variance_epsilon
        for norm in norms:
            norm.variance_epsilon = epsilon
        found = self.canaries()
        for norm in norms:
            norm.variance_epsilon = before
        return found

    def next_version(self, learning_rate: float) -> dict[str, Tensor]:
        """Return the weights after the first AdamW step that raises the canaries' likelihood."""
        sequences = [
            TokenSequence(np.asarray(ids, np.int32), len(ids) - 1) for ids in self._sequences
        ]
        for batch in pack(sequences, 1024):
            self._learner._policy.score(batch, 1.0).logprobs.sum().backward()
        moved = {
            name: (one + learning_rate * one.grad.sign()).detach().to(torch.bfloat16)
            for name, one in self._model.named_parameters()
        }
        self._model.zero_grad(set_to_none=True)
        return moved


def in_layer(tensors: Tensors) -> dict[str, Tensor]:
    return {k: v for k, v in tensors.items() if k.startswith(f"model.layers.{LAYER}.")}


def swapped(tensors: Tensors) -> dict[str, Tensor]:
    """Return q and k of one layer, with k and the first heads of q exchanged."""
    q, k = (f"model.layers.{LAYER}.self_attn.{part}_proj.weight" for part in "qk")
    rows = len(tensors[k])
    first, rest = tensors[q][:rows], tensors[q][rows:]
    return {q: torch.cat([tensors[k], rest]), k: first.clone()}


def half_of(new: Tensors, old: Tensors) -> dict[str, Tensor]:
    """Return weights in which one of two TP ranks still holds the older version."""
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    rows = ("o_proj", "down_proj")
    mixed = {}
    for name, tensor in new.items():
        dim = 0 if any(c in name for c in columns) else 1 if any(r in name for r in rows) else None
        if dim is not None:
            size = tensor.shape[dim] // 2
            parts = (
                old[name].narrow(dim, 0, size),
                tensor.narrow(dim, size, tensor.shape[dim] - size),
            )
            mixed[name] = torch.cat(parts, dim)
    return mixed


def noisy(tensors: Tensors, share: float) -> dict[str, Tensor]:
    """Add noise to each matrix: `share` of the matrix's standard deviation."""
    torch.manual_seed(0)
    return {
        name: (one.float() + share * one.float().std() * torch.randn(one.shape)).to(one.dtype)
        for name, one in tensors.items()
        if one.dim() == 2
    }


Case = tuple[Tensors, Callable[[], tuple[Canary, ...]]]
"""Weights that the engine loads, and a function that returns the trainer's canaries."""


def cases(policy: Policy) -> dict[str, Case]:
    v0 = policy.start
    found: dict[str, Case] = {
        "right": (v0, policy.canaries),
        "right again": (v0, policy.canaries),
        "q and k swapped in one layer": (v0 | swapped(v0), policy.canaries),
        "epsilon 1e-6 for 1e-5": (v0, partial(policy.canaries_with_epsilon, 1e-6)),
        "epsilon 1e-3 for 1e-5": (v0, partial(policy.canaries_with_epsilon, 1e-3)),
    }
    for share in (0.1, 0.03, 0.01):
        changed = noisy(in_layer(v0), share)
        found[f"noise of {share:g} in one layer"] = (v0 | changed, policy.canaries)
    for rate in (1e-5, 1e-3):
        v1 = policy.next_version(rate)
        new = partial(policy.canaries_of, v1)
        name = f"learning rate {rate:g}: "
        found[name + "right"] = (v1, new)
        found[name + "all of the version before"] = (v0, new)
        found[name + "one layer of the version before"] = (v1 | in_layer(v0), new)
        found[name + "one rank of the version before"] = (v1 | half_of(v1, v0), new)
        head = partial(policy.canaries_with_head, v1[EMBEDDING])
        found[name + "a stale tied head"] = (v0, head)
    return found


async def measure(model_dir: Path) -> dict[str, Any]:
    config = config_of(model_dir)
    policy = Policy(config, sampled(model_dir))
    engine = VLLMEngine(0, config.engine)
    await engine.start()
    results = {}
    for name, (tensors, canaries) in cases(policy).items():
        results[name] = await take(engine, tensors, canaries())
        print(name, results[name]["said"], flush=True)
    results["a layer is missing"] = await take(
        engine,
        {k: v for k, v in policy.start.items() if k not in in_layer(policy.start)},
        policy.canaries(),
    )
    await engine.shutdown()
    return results


async def take(
    engine: VLLMEngine, tensors: Tensors, canaries: tuple[Canary, ...]
) -> dict[str, Any]:
    """Load weights. Return the engine's message and all log-probabilities."""
    file = safetensors.torch.save(dict(tensors), {"format": "pt"})
    try:
        error = await engine.load_weights(PolicyWeights(0, file, canaries))
        said = f"error {error:.4f}"
    except WeightSyncError as refusal:
        said = str(refusal)
    return {
        "said": said,
        "refused": not said.startswith("error"),
        "exact": [canary.trainer_logprobs for canary in canaries],
        "rounded": [canary.rounded_logprobs for canary in canaries],
        "engine": await engine_logprobs(engine._llm, canaries),
    }


def written(value: Any) -> Any:
    """Round all numbers to keep the file small."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: written(one) for key, one in value.items()}
    return [written(one) for one in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    found = asyncio.run(measure(Path(sys.argv[1])))
    Path(sys.argv[2]).write_text(json.dumps(written(found)) + "\n")
