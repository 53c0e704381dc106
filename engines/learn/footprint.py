"""GPU memory of a trainer rank, by arithmetic. Pure.

A rank of n, of a model of P parameters in layers of Pl and a root of Pr (embeddings, norm, head)
that computes in bf16 with FSDP2's units (`engines.learn.policy`), keeps at all times, in float32,

    weights                             4 P / n             and as much a reference model
    gradients, two moments              12 P / n            of adapters alone, where there are some

and beside it the largest of what three phases of a backward pass need, for T tokens of which R are
predicted. h, q, k: widths of the residual stream, of all query heads, of all key heads; m: of what
MLPs compute for a token, h' of what they read; V: vocabulary; N: logits of a chunk; D: layers.

    head    2 Pr + 2 Pl + 2 V h + 20 N  + kept + 6 T h + 4 R h
    layer   2 Pr + 2 V h + 8 Pl + kept + A  + the more of 4 T m + 2 (gradients of the MLP), 6 T h'
    root    6 Pr
    kept    2 T h D with gradient_checkpointing, A D without (and no + A in a layer's phase)
    A       2 T (9 h + 2 q + 2 k + 4 m), and 6 T (q + k) more with norms of queries and keys

The root's bf16 copy is there from the head's backward pass until the embeddings'; the head's
gradient is added up beside it; FSDP2 gathers a layer ahead while the layer before is reduced in
float32; five tensors of float32 logits live in the backward pass of a chunk, and at most eight with
a gradient through the entropy, for 32 N in place of 20 N. `refrain bench memory`
compares with what FSDP2's memory tracker counts.

Computation in float32 takes at most twice as much beside the state, and is planned so.
"""

from dataclasses import dataclass

from engines.latency.model_shape import ModelShape
from engines.pat.memory import CONTEXT_BYTES, NCCL_BYTES

MAX_LOGITS = 2**28
"""Logits held at once in one chunk: 1 GiB in float32."""


@dataclass(frozen=True, slots=True)
class Training:
    """Settings of a training on which a rank's memory depends, beside the model."""

    num_ranks: int
    micro_batch_tokens: int
    response_tokens: int
    """Predicted tokens of a micro-batch, at most."""
    gradient_checkpointing: bool
    has_reference: bool = False
    num_replicas: int = 1
    """Copies of the model, each sharded over its part of the ranks."""
    adapter_params: int | None = None
    """Parameters that are trained instead of the model's own."""
    weight_bytes: int = 4
    """Bytes of a master weight, its gradient and each of its moments."""
    offload_optimizer: bool = False
    """Moments are there for the update alone, when no activations are."""
    entropy_gradient: bool = False
    """The loss has an entropy bonus."""
    reshard: bool = True
    """Otherwise the gathered model stays from one micro-batch to the next."""


@dataclass(frozen=True, slots=True)
class TrainerFootprint:
    """Bytes of the GPU of one rank."""

    state_bytes: float
    """Weights, gradients and moments, sharded."""
    reference_bytes: float
    kept_bytes: float
    """Activations between the forward and the backward pass."""
    work_bytes: float
    """Beside them at the peak: unsharded weights and gradients, activations at work, logits."""
    peak: str
    """Phase of the peak."""

    @property
    def tensor_bytes(self) -> float:
        return self.state_bytes + self.reference_bytes + self.kept_bytes + self.work_bytes

    @property
    def process_bytes(self) -> float:
        return CONTEXT_BYTES + NCCL_BYTES

    @property
    def bytes(self) -> float:
        return self.tensor_bytes + self.process_bytes

    def __str__(self) -> str:
        parts = {
            "of weights, gradients and moments": self.state_bytes,
            "of the reference model": self.reference_bytes,
            "of activations kept": self.kept_bytes,
            f"at work (most in the {self.peak})": self.work_bytes,
            "of the process": self.process_bytes,
        }
        return ", ".join(f"{num / 1e9:.1f} GB {what}" for what, num in parts.items() if num)


def trainer_footprint(shape: ModelShape, training: Training) -> TrainerFootprint:
    """Memory of a rank at its peak."""
    tokens = training.micro_batch_tokens
    layer = _layer_bytes(shape, tokens)
    kept = 2 * tokens * shape.hidden_size * shape.num_layers
    if not training.gradient_checkpointing:
        kept = layer * shape.num_layers
        if training.adapter_params and shape.num_experts:
            kept += 2 * shape.layer_params  # Merged experts, which gradients are made with.
    phases = {
        "head": _head_phase(shape, training),
        "layers": _layer_phase(shape, training, layer),
        "root": _root_phase(shape) - kept,
    }
    peak = max(phases, key=phases.__getitem__)
    widening = shape.element_bytes / 2
    shards = training.num_ranks // training.num_replicas
    held = shape.num_params + (training.adapter_params or 0) + _trained(shape, training)
    weights, moments = training.weight_bytes * held / shards, moment_bytes(shape, training) / shards
    reference = training.weight_bytes * shape.num_params / shards
    kept, work = widening * kept, widening * phases[peak]
    if not training.reshard:
        work += shape.element_bytes * shape.num_params
    if training.offload_optimizer:
        if moments > kept + work:
            peak, work = "update", moments - kept
        moments = 0.0
    return TrainerFootprint(
        state_bytes=weights + moments,
        reference_bytes=reference if training.has_reference else 0.0,
        kept_bytes=kept,
        work_bytes=work,
        peak=peak,
    )


def resting_bytes(shape: ModelShape, training: Training) -> float:
    """Bytes of a rank's tensors on its GPU between two steps: no gradients, no activations."""
    models = shape.num_params * (2 if training.has_reference else 1)
    held = training.weight_bytes * (models + (training.adapter_params or 0))
    moments = 0.0 if training.offload_optimizer else moment_bytes(shape, training)
    return (held + moments) * training.num_replicas / training.num_ranks


def moment_bytes(shape: ModelShape, training: Training) -> float:
    """Bytes of AdamW's moments, of all ranks of a replica."""
    return 2.0 * training.weight_bytes * _trained(shape, training)


def _trained(shape: ModelShape, training: Training) -> int:
    adapters = training.adapter_params
    return shape.num_params if adapters is None else adapters


def adapter_params(shape: ModelShape, rank: int) -> int:
    """Parameters of adapters of all linear layers, experts and routers; `rank`: their inner width,
    twice as much where an expert's two weights are one."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner, experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
    ends = 2 * (hidden + query) + 2 * (hidden + key)
    if experts:
        ends += experts * (2 * (hidden + 2 * inner) + inner + hidden) + hidden + experts
    else:
        ends += 3 * (hidden + inner)
    return rank * ends * shape.num_layers


def _layer_bytes(shape: ModelShape, tokens: int) -> float:
    """Activations that a layer saves."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    heads = (5 if shape.qk_norm else 2) * (query + key)
    residual = 9 * shape.hidden_size
    return 2.0 * tokens * (residual + heads + _mlp_width(shape))


def _mlp_width(shape: ModelShape) -> int:
    """Elements that the MLPs save for a token; experts their input and output too."""
    inner = 4 * shape.intermediate_size
    if shape.num_experts:
        return shape.experts_per_token * (inner + 2 * shape.hidden_size)
    return inner


def _head_phase(shape: ModelShape, training: Training) -> float:
    root = _root_params(shape)
    tokens, response = training.micro_batch_tokens, training.response_tokens
    chunk = max(1, MAX_LOGITS // shape.vocab_size)
    hidden = shape.hidden_size * (6 * tokens + 4 * response)
    per_logit = 32 if training.entropy_gradient else 20
    if response <= chunk:
        work = per_logit * response * shape.vocab_size
    else:
        # Its gradients of all chunks but the current one are one sum.
        work = 2 * shape.head_params + max(
            per_logit * chunk * shape.vocab_size, 4 * shape.head_params
        )
    return 2 * root + 2 * _layer_params(shape) + work + hidden


def _layer_phase(shape: ModelShape, training: Training, layer_bytes: float) -> float:
    tokens, one = training.micro_batch_tokens, _layer_params(shape)
    per_token = shape.experts_per_token if shape.num_experts else 1
    gradients = 2 * shape.hidden_size * shape.intermediate_size * (shape.num_experts or 1)
    work = 4 * tokens * per_token * shape.intermediate_size + gradients
    if shape.num_experts:
        work = max(work, 6 * tokens * per_token * shape.hidden_size)
    again = layer_bytes if training.gradient_checkpointing else 0.0
    return 2 * _root_params(shape) + 2 * shape.head_params + 8 * one + again + work


def _root_phase(shape: ModelShape) -> float:
    return 6 * _root_params(shape)


def _layer_params(shape: ModelShape) -> float:
    return shape.layer_params / shape.num_layers


def _root_params(shape: ModelShape) -> int:
    return shape.num_params - shape.layer_params
