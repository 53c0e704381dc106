"""An update of the trainer, counted without a GPU: launches, bytes and FLOPs, eager and compiled.

The update is one micro-batch of four samples of 1,024 + 3,072 tokens in one row, forward and
backward with gradient checkpointing, then clipping and AdamW. Tensors are fake: they have shapes
and no data. Layers compute in bfloat16, the optimiser in float32. Attention is that of the CUDA
path: one kernel forward and one backward. FSDP2's casts and collectives are not counted.

`before` is an eager layer with the attention that copied its inputs. Counted are torch's operations
but views (`benchmarks.operations`). `after` is what `engines.learn.compiled` makes of it. Counted
are the kernels that Inductor plans, and the operations that stay eager
(`benchmarks.fused_kernels`).

A layer is what a second layer adds to a model of one. `launches_over_before` and
`bytes_over_before` are a layer's, for the model that gains least. `kept_bytes_*` are those that a
layer without gradient checkpointing keeps for its backward pass, and `update_*` is the whole
update. FLOPs are those of matrix products and attention, as the eager pass has them.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch._inductor.config
import torch.nn.attention.varlen  # Registers its operations.
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from refrain.benchmarks.fused_kernels import FusedKernels
from refrain.benchmarks.laps import Measured, Row
from refrain.benchmarks.memory import qwen3_config
from refrain.benchmarks.operations import Traffic
from refrain.benchmarks.tracked_memory import flash_attention, policy_of
from refrain.engines.latency.model_shape import SHAPES, ModelShape
from refrain.engines.learn.bounds import SampleBounds
from refrain.engines.learn.compiled import compile_layers
from refrain.engines.learn.loading import Loading
from refrain.engines.learn.packing import TokenSequence, pack
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport

PACKAGES = ("refrain-rl", "torch", "transformers")
MODELS = {"1_7b": "Qwen3-1.7B", "8b": "Qwen3-8B"}
"""Models by their names in the figures."""
NUM_SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 1024, 3072
RECOMPUTED = Loading(torch.device("cpu"), gradient_checkpointing=True)
NUM_TOKENS = NUM_SAMPLES * (PROMPT_TOKENS + RESPONSE_TOKENS)


@dataclass(frozen=True, slots=True)
class Counts:
    """Work of a pass or of an update."""

    launches: int
    num_bytes: int
    flops: int = 0
    """Of matrix products and attention, the layers computed again included."""
    kept: int = 0
    """Bytes that stay from the forward to the backward pass without gradient checkpointing."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: int) -> "Counts":
        return Counts(*(factor * number for number in astuple(self)))


def add_arguments(parser: ArgumentParser) -> None:
    del parser


def measure(args: Namespace, console: Console) -> Measured:
    del args
    figures: dict[str, int | float] = {}
    rows: list[Row] = []
    for name in track(MODELS, "counted", console=console, transient=True):
        shape = SHAPES[MODELS[name]]
        before, after = (count_update(shape, compiled=compiled) for compiled in (False, True))
        figures |= _figures(name, before, after)
        rows += [_row(MODELS[name], "before", *part) for part in before.items()]
        rows += [_row(MODELS[name], "after", *part) for part in after.items()]
    for of in ("launches_over_before", "bytes_over_before"):
        figures[of] = max(figures[f"{of}_{name}"] for name in MODELS)
    return figures, rows


def _figures(name: str, before: dict[str, Counts], after: dict[str, Counts]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for part, prefix in (("layer", ""), ("update", "update_")):
        one, other = before[part], after[part]
        figures[f"{prefix}launches_over_before_{name}"] = other.launches / one.launches
        figures[f"{prefix}bytes_over_before_{name}"] = other.num_bytes / one.num_bytes
    figures[f"kept_bytes_over_before_{name}"] = after["layer"].kept / before["layer"].kept
    return figures


def _row(model: str, of: str, part: str, counts: Counts) -> Row:
    return {
        "model": model,
        "part": part,
        "of": of,
        "launches": counts.launches,
        "bytes_per_token": counts.num_bytes / NUM_TOKENS,
        "flops_per_token": counts.flops / NUM_TOKENS,
        "kept_bytes_per_token": counts.kept / NUM_TOKENS,
    }


def count_update(shape: ModelShape, *, compiled: bool) -> dict[str, Counts]:
    """Count a layer's pass and the whole update."""
    one, two = count_passes(shape, compiled=compiled)
    layer, further = two + one.times(-1), shape.num_layers - 1
    least, more = (count_optimiser(shape, num) for num in (1, 2))
    optimiser = least + (more + least.times(-1)).times(further)
    return {"layer": layer, "update": one + layer.times(further) + optimiser}


def count_passes(shape: ModelShape, *, compiled: bool) -> tuple[Counts, Counts]:
    """Count a forward and a backward pass of a model with one layer, and with two."""
    copying = partial(flash_attention, rows=copied_rows)
    attention = torch.compiler.disable(flash_attention) if compiled else copying
    policy = policy_of(_config(shape, 2), RECOMPUTED, attention)
    policy.to(torch.bfloat16)
    traffic = Traffic()
    # What Inductor fuses for a CPU depends on its number of threads.
    one_thread = torch._inductor.config.patch({"cpp.threads": 1})
    with one_thread, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        policy.to_empty(device="cpu")
        inputs = _inputs(mode)
        if compiled:
            compile_layers(policy, FusedKernels(traffic))
        # The first pass compiles, and makes gradients to add to.
        _scores(policy, inputs).sum().backward()
        two = _counted_pass(policy, inputs, traffic)
        policy.model.config.num_hidden_layers = 1
        return _counted_pass(policy, inputs, traffic), two


def _counted_pass(policy: PolicyModel, inputs: tuple[Any, ...], traffic: Traffic) -> Counts:
    traffic.launches, traffic.num_bytes = [], 0
    with traffic:
        _scores(policy, inputs).sum().backward()
    launches, num_bytes = len(traffic.launches), traffic.num_bytes
    with policy.uncompiled(), FlopCounterMode(display=False, custom_mapping=_FLOPS) as flops:
        _scores(policy, inputs).sum().backward()
    return Counts(launches, num_bytes, flops.get_total_flops(), _kept_bytes(policy, inputs))


def _kept_bytes(policy: PolicyModel, inputs: tuple[Any, ...]) -> int:
    """Return the bytes that a forward pass without gradient checkpointing keeps for the backward
    pass, apart from parameters."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    for layer in policy.layers:
        layer.gradient_checkpointing = False
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = _scores(policy, inputs)  # Keep them: freed storage may be used again.
    for layer in policy.layers:
        layer.gradient_checkpointing = True
    for parameter in policy.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    del scores
    return sum(kept.values())


def count_optimiser(shape: ModelShape, num_layers: int) -> Counts:
    """Count clipping and AdamW of a model with so many layers, in float32."""
    policy = policy_of(_config(shape, num_layers), RECOMPUTED)
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy.to_empty(device="cpu")
        optimiser = torch.optim.AdamW(policy.parameters(), fused=True)
        for traffic in (Traffic(), counted := Traffic()):  # The first step makes the moments.
            for parameter in policy.parameters():
                parameter.grad = torch.empty_like(parameter)
            with traffic:
                nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimiser.step()
    return Counts(len(counted.launches), counted.num_bytes)


def _config(shape: ModelShape, num_layers: int) -> dict[str, Any]:
    return qwen3_config(shape) | {"num_hidden_layers": num_layers}


def copied_rows(*tensors: Tensor) -> list[Tensor]:
    """Return query, key and value as rows of tokens as the trainer did: selected and padded by
    copies."""
    return [F.pad(one[0].transpose(0, 1), (0, 0)) for one in tensors]


def _inputs(mode: FakeTensorMode) -> tuple[Any, ...]:
    """Return a row as the policy takes it, and its targets."""
    ids = np.zeros(PROMPT_TOKENS + RESPONSE_TOKENS + 1, np.int32)
    (batch,) = pack([TokenSequence(ids, PROMPT_TOKENS + 1)] * NUM_SAMPLES, NUM_TOKENS)
    arrays = (batch.input_ids, batch.position_ids, batch.predict_at, batch.targets)
    input_ids, positions, predict_at, targets = (
        mode.from_tensor(torch.from_numpy(array)) for array in arrays
    )
    bounds = mode.from_tensor(torch.zeros(NUM_SAMPLES + 1, dtype=torch.int32))
    return (
        input_ids,
        positions,
        predict_at,
        SampleBounds(bounds, max(batch.num_tokens), ()),
        targets,
    )


def _scores(policy: PolicyModel, inputs: tuple[Any, ...]) -> Tensor:
    return policy(*inputs, 1.0).logprobs


def _attention_flops(query: Any, key: Any, value: Any, *bounds: Any, **_: Any) -> int:
    """Return the FLOPs of causal attention from shapes. `bounds` end with the longest sample."""
    del key, value
    tokens, heads, width = query
    return 2 * tokens * bounds[2] * heads * width


def _backward_flops(_: Any, *shapes: Any, **how: Any) -> int:
    """Return the FLOPs of five products, one of which computes the scores again."""
    query, key, value, _out, _lse, *bounds = shapes
    return 5 * _attention_flops(query, key, value, *bounds, **how) // 2


_FLOPS = {
    torch.ops.torch_attn._varlen_attn: _attention_flops,
    torch.ops.torch_attn._varlen_attn_backward: _backward_flops,
}


def show(report: BenchReport, console: Console) -> None:
    table = plain_table(
        "model",
        "part",
        "of",
        "launches",
        "KB a token",
        "GFLOP a token",
        text=("model", "part", "of"),
    )
    for row in report.rows:
        numbers = (
            f"{row['launches']:,}",
            f"{row['bytes_per_token'] / 1e3:,.0f}",
            f"{row['flops_per_token'] / 1e9:.2f}",
        )
        table.add_row(*(str(row[name]) for name in ("model", "part", "of")), *numbers)
    console.print(table)
    for name, value in report.figures.items():
        console.print(f"{name}  {value:,.3f}")
