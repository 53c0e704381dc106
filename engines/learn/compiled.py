"""Compile a policy's decoder layers and the scores of its tokens with `torch.compile`.

    norm │ queries, keys, values, their norms, rope │ attention │ output │ add, norm, MLP, add
    └──────────────── compiled ─────────────────────┘   eager   └───────── compiled ─────────┘

Attention breaks the graph: its kernel knows the samples of the row, and nothing that is compiled
may depend on them. So all layers share one compilation, and a row of another length needs no other
one. Everything between matrix products and attention becomes one kernel each. After the output
layer, one pass over the logits gives log-probabilities and entropies.

Compiled layers round otherwise than eager ones: in float32 an update agrees to 1e-6.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from transformers import AttentionInterface

from refrain.engines.latency.model_shape import EXPERT_FIELDS, FURTHER_EXPERTS
from refrain.engines.learn.attention import packed_attention
from refrain.engines.learn.determinism import probe_sequences
from refrain.engines.learn.packing import lay_out
from refrain.engines.learn.policy import PolicyModel, token_scores
from refrain.engines.learn.row_mask import PACKED
from refrain.engines.learn.sample_isolation import NO_TOKENS_TOLERANCE


def is_worthwhile(policy: PolicyModel) -> bool:
    """Return whether `trainer.compile: auto` compiles a policy: on CUDA, if each layer is a dense
    one whose samples share a row. Experts choose shapes by their tokens, which breaks graphs."""
    text = policy.model.config.get_text_config().to_dict()
    has_experts = any(text.get(field) for field in (*EXPERT_FIELDS, *FURTHER_EXPERTS))
    return policy.device.type == "cuda" and not policy.alone and not has_experts


def compile_policy(
    policy: PolicyModel, setting: Literal["auto"] | bool, dtype: torch.dtype
) -> None:
    """Compile a loaded policy if the setting `trainer.compile` says so, and check the result.

    `dtype`: data type in which the policy computes. Raise ValueError as `check_compiled` does.
    Collective.
    """
    if is_worthwhile(policy) if setting == "auto" else setting:
        compile_layers(policy)
        check_compiled(policy, dtype)


def compile_layers(policy: PolicyModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile a policy in place. The work is done when a layer first computes."""
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    for layer in policy.layers:
        # Hooks, as of FSDP2 and of gradient checkpointing, stay outside.
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)
    policy.token_scores = torch.compile(token_scores, backend=backend, dynamic=True)
    policy.is_compiled = True


def check_compiled(policy: PolicyModel, dtype: torch.dtype) -> None:
    """Raise ValueError when compiled layers fail, or compute other values than eager ones.

    Make one pass forward and backward, so that a missing compiler shows before the first step.
    Leave no gradients. Collective.
    """
    batch = lay_out([0] if policy.alone else [0, 1], probe_sequences(policy))
    with torch.no_grad(), policy.uncompiled():
        expected = policy.score(batch, 1.0).logprobs
    try:
        found = policy.score(batch, 1.0).logprobs
        found.sum().backward()
    except Exception as error:  # Compilers fail in many ways.
        said = " ".join(str(error).split("\n\n")[0].split())
        raise ValueError(_refusal(policy, f"cannot be compiled: {said}")) from error
    policy.zero_grad(set_to_none=True)
    difference = (found.detach() - expected).abs().mean().item()
    if not difference <= NO_TOKENS_TOLERANCE[dtype]:
        said = f"compute other values when compiled: {difference:.2g} nats in the mean"
        raise ValueError(_refusal(policy, said))


def _refusal(policy: PolicyModel, what: str) -> str:
    name = type(policy.model).__name__
    return f"the decoder layers of {name} {what}. Set trainer.compile=false"
