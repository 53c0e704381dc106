"""The policy: a Hugging Face causal language model that gives log-probabilities of packed tokens.

```
PolicyModel                FSDP unit: embeddings, last norm, head
└─ model                   Hugging Face model, float32 master weights
   └─ decoder layers       one FSDP unit each
```

The head is applied to response positions only and, for a large vocabulary, in chunks that are
recomputed in the backward pass: full logits of a micro-batch would need more memory than the model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines.learn.attention import PACKED, SampleBounds
from engines.learn.head import Head
from engines.learn.packing import MicroBatch, TokenSequence, pack

MAX_LOGITS = 2**28
"""Logits held at once in one chunk: 1 GiB in float32."""


class TokenScores(NamedTuple):
    """Scores of the predicted tokens of a micro-batch under the policy."""

    logprobs: Float[Tensor, "tokens"]
    """Log-probability of each token under softmax(logits / T)."""
    entropies: Float[Tensor, "tokens"]
    """Entropy of the distribution that each was drawn from, in nats; without gradient."""


class PolicyModel(nn.Module):
    """A causal language model behind the one question that training asks it."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError when its logits are none that `Head` knows."""
        super().__init__()
        self.model = model
        self._head = Head.of(model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size

    def score(self, batch: MicroBatch, temperature: float) -> TokenScores:
        """Scores of `batch.targets` under softmax(logits / temperature)."""
        arrays = (batch.input_ids, batch.position_ids, batch.predict_at, batch.targets)
        tensors = (torch.from_numpy(array).to(self.device) for array in arrays)
        return self(*tensors, SampleBounds.of(batch.num_tokens, self.device), temperature)

    def forward(
        self,
        input_ids: Int[Tensor, "row"],
        position_ids: Int[Tensor, "row"],
        predict_at: Int[Tensor, "tokens"],
        targets: Int[Tensor, "tokens"],
        segments: SampleBounds,
        temperature: float,
    ) -> TokenScores:
        output = self.model.get_decoder()(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            segments=segments,
            use_cache=False,
        )
        hidden = output.last_hidden_state[0, predict_at]
        chunk_tokens = max(1, MAX_LOGITS // self.vocab_size)
        if len(targets) <= chunk_tokens:
            return TokenScores(*self._score_chunk(hidden, targets, temperature))
        chunks = [
            checkpoint(self._score_chunk, *chunk, temperature, use_reentrant=False)
            for chunk in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        ]
        return TokenScores(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))

    def _score_chunk(
        self,
        hidden: Float[Tensor, "chunk width"],
        targets: Int[Tensor, "chunk"],
        temperature: float,
    ) -> tuple[Float[Tensor, "chunk"], Float[Tensor, "chunk"]]:
        logits = self._head.logits(self.model, hidden) / temperature
        log_normaliser = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_normaliser
        with torch.no_grad():
            probabilities = torch.exp(logits - log_normaliser[:, None])
            entropies = log_normaliser - (probabilities * logits).sum(-1)
        return logprobs, entropies


@torch.no_grad()
def score_sequences(
    policy: PolicyModel,
    sequences: Sequence[TokenSequence],
    micro_batch_tokens: int,
    temperature: float,
) -> list[NDArray[np.float32]]:
    """Log-probabilities of each sequence's response tokens, without a gradient."""
    by_sample: dict[int, NDArray[np.float32]] = {}
    for batch in pack(sequences, micro_batch_tokens):
        values = policy.score(batch, temperature).logprobs.cpu().numpy()
        ends = np.cumsum([sequences[sample].num_response_tokens for sample in batch.samples])
        by_sample.update(zip(batch.samples, np.split(values, ends[:-1]), strict=True))
    return [by_sample[sample] for sample in range(len(sequences))]


def load_policy(
    model_dir: Path,
    *,
    device: torch.device,
    mesh: DeviceMesh | None,
    gradient_checkpointing: bool,
    compute_dtype: torch.dtype = torch.float32,
) -> PolicyModel:
    """A policy with float32 weights, sharded by FSDP2 over `mesh` if there is one: then it computes
    in `compute_dtype`, of which no layer has a copy but while it is at work, and adds gradients in
    float32.

    Dropout is off: the rollout engines have none, and the ratio to them must start at 1. Raises
    ValueError when transformers cannot load the directory, weights are missing from it, or the
    model's logits are none that `Head` knows.
    """
    policy = PolicyModel(_load_model(model_dir))
    policy.train()
    _switch_off_dropout(policy)
    if gradient_checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    if mesh is None:
        return policy.to(device)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in policy.modules():
        if type(module).__name__ in (policy.model._no_split_modules or ()):
            fully_shard(module, mesh=mesh, mp_policy=precision)
    # Resharded even as the root: after a forward pass without a backward pass, as for canaries, the
    # parameters would otherwise no longer be those that the optimiser knows.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    return policy


def _load_model(model_dir: Path) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=torch.float32,
            attn_implementation=PACKED,
            local_files_only=True,
            output_loading_info=True,
        )
        model, report = loaded
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"cannot load the model in {model_dir}: {error}") from error
    if report["missing_keys"]:
        raise ValueError(
            f"{model_dir} lacks weights: {sorted(report['missing_keys'])[:5]} ...; its config.json "
            "does not belong to its weights"
        )
    return model


def _switch_off_dropout(policy: PolicyModel) -> None:
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if "attention_dropout" in vars(module):
            vars(module)["attention_dropout"] = 0.0
