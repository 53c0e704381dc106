"""Compute the GPU memory of a trainer rank. Pure.

Take a rank of n, and a model of P parameters: Pl in each layer, Pr in the root (embeddings, norm,
head). The model computes in bf16 with FSDP2's units (`engines.learn.policy`). At all times a rank
keeps, in float32,

    weights                             4 P / n             and those of a reference or teacher
    gradients, two moments              12 P / n            of the adapters alone, if any
    draft head (`train_head`)           16 (7 h h + h)      whole on each rank

A backward pass has three phases. The largest of them adds to that, for T tokens of which R are
predicted:

    head    2 Pr + 2 Pl + 2 V h + 20 N  + kept + 6 T h + 4 R h
    layer   2 Pr + 2 V h + 8 Pl + kept + A  + the more of 4 T m + 2 (gradients of the MLP), 6 T h'
    root    6 Pr
    kept    2 T h for each layer that is computed again, A for each other one (if all are others,
            a layer's phase has no + A)
    A       2 T (9 h + 2 q + 2 k + 4 m), and 6 T (q + k) more with norms of queries and keys

    h, q, k    widths of the residual stream, of all query heads, of all key heads
    m, h'      widths that MLPs compute for a token, and that they read
    V, N, D    size of the vocabulary, logits of a chunk, number of layers

The root's bf16 copy exists from the head's backward pass until the embeddings'. The head's gradient
is accumulated beside it. FSDP2 gathers a layer ahead while it reduces the layer before in float32.
The backward pass of a chunk holds five tensors of float32 logits. With a gradient through the
entropy it holds up to eight, so 32 N replaces 20 N. `refrain bench memory` compares these numbers
with FSDP2's memory tracker.

With `context_parallel` n, T are the tokens of a rank, in a row of n T. Key heads are repeated up to
a multiple of n, of width k'. The exchanged attention is saved too, so A is 2 T (9 h + 3 q + 2 k' +
4 m). The exchange itself takes less than the MLP, whose activations are free by then.

Computing in float32 takes at most twice as much besides the state, and is planned as twice.
"""

from dataclasses import dataclass, replace
from math import lcm

from refrain.engines.latency.model_shape import ModelShape
from refrain.engines.pat.memory import CONTEXT_BYTES, NCCL_BYTES

MAX_LOGITS = 2**28
"""Most logits in one chunk: 1 GiB in float32."""


@dataclass(frozen=True, slots=True)
class Training:
    """Settings besides the model that determine a rank's memory."""

    num_ranks: int
    micro_batch_tokens: int
    """Tokens of a row that this rank holds."""
    response_tokens: int
    """Most predicted tokens among them."""
    gradient_checkpointing: bool
    reference_params: int = 0
    """Parameters of a reference model or a teacher; 0: none."""
    num_replicas: int = 1
    """Copies of the model. Each is sharded over its part of the ranks."""
    adapter_params: int | None = None
    """Parameters of the adapters; None: the model's own parameters are trained."""
    weight_bytes: int = 4
    """Bytes of a master weight, of its gradient and of each of its moments."""
    offload_optimizer: bool = False
    """Whether moments are on the GPU only during the update, when there are no activations."""
    entropy_gradient: bool = False
    """Whether the loss has an entropy bonus."""
    kept_layers: int = 0
    """Layers that keep their activations although `gradient_checkpointing` is on."""
    draft_head_params: int = 0
    """Parameters of a draft head that is trained along: whole on each rank, in float32."""
    context_parallel: int = 1
    """Ranks that share a row."""


@dataclass(frozen=True, slots=True)
class TrainerFootprint:
    """GPU memory of one rank."""

    state_bytes: float
    """Weights, gradients and moments, sharded."""
    reference_bytes: float
    kept_bytes: float
    """Activations kept from the forward to the backward pass."""
    work_bytes: float
    """Added at the peak: unsharded weights and gradients, the current activations, logits."""
    peak: str
    """Phase with the peak."""

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
    """Return the memory of a rank at its peak."""
    layer = _layer_bytes(shape, training)
    kept = _kept_bytes(shape, training, layer)
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
    kept, work = widening * kept, widening * phases[peak]
    if training.offload_optimizer:
        if moments > kept + work:
            peak, work = "update", moments - kept
        moments = 0.0
    return TrainerFootprint(
        state_bytes=weights + moments + 16.0 * training.draft_head_params,
        reference_bytes=training.weight_bytes * training.reference_params / shards,
        kept_bytes=kept,
        work_bytes=work,
        peak=peak,
    )


def with_kept_layers(shape: ModelShape, training: Training, usable_bytes: float) -> Training:
    """Return the training in which as many layers as fit keep their activations."""
    choices = (replace(training, kept_layers=num) for num in range(shape.num_layers, 0, -1))
    fitting = (one for one in choices if trainer_footprint(shape, one).bytes <= usable_bytes)
    return next(fitting, training)


def resting_bytes(shape: ModelShape, training: Training) -> float:
    """Return the bytes of a rank's tensors between two steps: no gradients, no activations."""
    models = shape.num_params + training.reference_params
    held = training.weight_bytes * (models + (training.adapter_params or 0))
    moments = 0.0 if training.offload_optimizer else moment_bytes(shape, training)
    head = 12.0 * training.draft_head_params
    return (held + moments) * training.num_replicas / training.num_ranks + head


def moment_bytes(shape: ModelShape, training: Training) -> float:
    """Return the bytes of AdamW's moments on all ranks of a replica."""
    return 2.0 * training.weight_bytes * _trained(shape, training)


def _trained(shape: ModelShape, training: Training) -> int:
    adapters = training.adapter_params
    return shape.num_params if adapters is None else adapters


def adapter_params(shape: ModelShape, rank: int) -> int:
    """Return the number of parameters of adapters for all linear layers, experts and routers.
    `rank`: the adapters' inner width; it doubles when an expert's two weights are stored as one."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner, experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
    ends = 2 * (hidden + query) + 2 * (hidden + key)
    if experts:
        ends += experts * (2 * (hidden + 2 * inner) + inner + hidden) + hidden + experts
    else:
        ends += 3 * (hidden + inner)
    return rank * ends * shape.num_layers


def draft_head_params(shape: ModelShape) -> int:
    """Return the number of parameters of a draft head of the usual inner size."""
    return shape.hidden_size * (7 * shape.hidden_size + 1)


def _layer_bytes(shape: ModelShape, training: Training) -> float:
    """Return the bytes of activations that a layer saves."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    heads = 2 * (query + _exchanged_key(shape, training))
    if shape.qk_norm:
        heads += 3 * (query + key)
    if training.context_parallel > 1:
        heads += query
    residual = 9 * shape.hidden_size
    return 2.0 * training.micro_batch_tokens * (residual + heads + _mlp_width(shape))


def _exchanged_key(shape: ModelShape, training: Training) -> int:
    """Return the width of all key heads, repeated so that the ranks of a row share them evenly."""
    return lcm(shape.num_kv_heads, training.context_parallel) * shape.head_dim


def _num_kept(shape: ModelShape, training: Training) -> int:
    """Return the number of layers whose activations stay until their backward pass."""
    return training.kept_layers if training.gradient_checkpointing else shape.num_layers


def _kept_bytes(shape: ModelShape, training: Training, layer_bytes: float) -> float:
    num_kept = _num_kept(shape, training)
    one_input = 2 * training.micro_batch_tokens * shape.hidden_size
    kept = one_input * (shape.num_layers - num_kept) + layer_bytes * num_kept
    if training.adapter_params and shape.num_experts:
        kept += 2 * _layer_params(shape) * num_kept  # Merged experts, which the gradients need.
    return kept


def _mlp_width(shape: ModelShape) -> int:
    """Return the elements that MLPs save for a token. Experts also save their input and output."""
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
        # One sum holds the head's gradients of all chunks but the current one.
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
    again = layer_bytes if _num_kept(shape, training) < shape.num_layers else 0.0
    return 2 * _root_params(shape) + 2 * shape.head_params + 8 * one + again + work


def _root_phase(shape: ModelShape) -> float:
    return 6 * _root_params(shape)


def _layer_params(shape: ModelShape) -> float:
    return shape.layer_params / shape.num_layers


def _root_params(shape: ModelShape) -> int:
    return shape.num_params - shape.layer_params
