"""Attention over packed samples gives the same as each sample alone, for models of many shapes."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from refrain.engines.learn import attention
from refrain.engines.learn.attention import PACKED, by_bounds, packed_attention
from refrain.engines.learn.bounds import SampleBounds
from refrain.engines.learn.head import decoder_of
from refrain.engines.learn.row_mask import RowMask, row_of

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 24, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 24},
    "phi3": {"sliding_window": 24},
    "granite": {"attention_multiplier": 0.3},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
FEATURES: dict[str, dict[str, Any]] = {
    # The layers of these models get the window from the mask only.
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "phimoe": {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Attention sinks, in layers with a window and without.
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {"sliding_window": 24},
    # Chunked attention.
    "llama4_text": {
        "attention_chunk_size": 24,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    # The layers pass nothing but the mask to their attention.
    "nemotron": {},
}
LENGTHS = [700, 130, 60, 58, 57, 30, 8, 1]


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | (SHAPES | FEATURES)[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model


def packed(model: PreTrainedModel, samples: list[torch.Tensor]) -> torch.Tensor:
    """Return the hidden states of all samples, packed into one row."""
    model.set_attn_implementation(PACKED)
    with row_of(SampleBounds.of([len(sample) for sample in samples], torch.device("cpu"))):
        return decoder_of(model)(
            input_ids=torch.cat(samples)[None],
            position_ids=torch.cat([torch.arange(len(sample)) for sample in samples])[None],
            use_cache=False,
        ).last_hidden_state[0]


@pytest.mark.parametrize("kind", [*SHAPES, *FEATURES])
def test_packed_samples_compute_as_separate_ones(kind: str) -> None:
    model = model_of(kind)
    samples = [torch.randint(1, 64, (length,)) for length in LENGTHS]
    alone = torch.cat(
        [decoder_of(model)(one[None], use_cache=False).last_hidden_state[0] for one in samples]
    )
    weights = torch.randn_like(alone)
    parameters = [p for p in decoder_of(model).parameters() if p.requires_grad]
    expected = torch.autograd.grad((alone * weights).sum(), parameters)
    together = packed(model, samples)
    torch.testing.assert_close(together, alone, atol=2e-4, rtol=1e-3)
    gradients = torch.autograd.grad((together * weights).sum(), parameters)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(
            gradient, wanted, atol=2e-3 * float(wanted.abs().max()), rtol=1e-2
        )


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the number of elements of the largest tensor that is created."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.num = max(self.num, tensor.numel())
        return made


def test_blocks_are_small_where_many_heads_see_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = model_of("gpt_oss"), [torch.randint(1, 64, (300,))] * 3
    with Largest() as at_once:
        expected = packed(model, samples)
    assert at_once.num >= 3 * 4 * 300 * 300
    monkeypatch.setattr(attention, "MAX_SCORES", 3 * 4 * 300 * 7)
    with Largest() as in_parts:
        found = packed(model, samples)
    torch.testing.assert_close(found, expected)
    assert in_parts.num < at_once.num / 3


class Attention(torch.nn.Module):
    """An attention layer of an unknown model."""

    config = LlamaConfig()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "llama gives its attention the argument position_bias"),
        ({"temperature": 2.0}, "the argument temperature"),
        ({"dropout": 0.1}, "the argument dropout"),
        ({"is_causal": False}, "the argument is_causal"),
        ({"attention_mask": None}, "Attention of llama gives its attention no mask"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "a mask of its own"),
    ],
)
def test_unknown_attention_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    mask = RowMask(SampleBounds.of([3, 1], torch.device("cpu")))
    heads = [torch.randn(1, 2, 4, 8)] * 3
    harmless = {"dropout": 0.0, "is_causal": True, "position_ids": torch.zeros(1), "other": None}
    packed_attention(Attention(), *heads, mask, **harmless)
    with pytest.raises(ValueError, match=message):
        packed_attention(Attention(), *heads, **{"attention_mask": mask} | given)


def by_pairs(
    q: Any, k: Any, v: Any, bounds: Any, *_: Any, scale: float, window_size: Any, **__: Any
):
    """Compute what torch documents for `varlen_attn`: each sample alone, all pairs of tokens."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    left, parts = window_size[0], []
    for start, end in pairwise(bounds.tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end].repeat_interleave(2, 1))
        since = torch.arange(end - start)[:, None] - torch.arange(end - start)
        hidden = (since < 0) | ((since > left) if left >= 0 else False)
        weights = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[start:end].repeat_interleave(2, 1)))
    return torch.cat(parts)


@pytest.mark.parametrize("looks", [{}, {"window": 5}, {"chunk": 8}], ids=str)
@pytest.mark.parametrize("widths", [(16, 16), (12, 8), (8, 20)], ids=str)
def test_flash_attention_is_asked_for_the_same(
    looks: dict[str, int], widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", by_pairs)
    lengths = [30, 29, 16, 8, 5, 1]
    mask = RowMask(SampleBounds.of(lengths, torch.device("cpu")), **looks)
    shapes = (4, widths[0]), (2, widths[0]), (2, widths[1])
    rows = [torch.randn(sum(lengths), *shape) for shape in shapes]
    heads = [row.transpose(0, 1)[None] for row in rows]
    expected, _ = packed_attention(Attention(), *heads, mask, scaling=0.3)
    torch.testing.assert_close(by_bounds(rows, mask, 0.3), expected[0])


def test_a_model_that_makes_masks_of_its_own_is_refused() -> None:
    config = AutoConfig.for_model("doge", **SMALL)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="doge works on its mask itself"):
        packed(model, [torch.arange(1, 30)])


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_no_tensor_grows_faster_than_the_tokens(kind: str) -> None:
    """Twice the tokens may need at most 2.1 times the memory. A full mask, or scores of all pairs,
    would need four times."""
    model, num_elements = model_of(kind), []
    for copies in (1, 2):
        samples = [torch.randint(1, 64, (600,))] * (4 * copies)
        with Largest() as largest:
            packed(model, samples).sum().backward()
        num_elements.append(largest.num)
    assert num_elements[1] <= 2.1 * num_elements[0]
    if kind == "llama":
        largest_row = max(SMALL["hidden_size"], SMALL["intermediate_size"])
        assert num_elements[0] <= 4 * 600 * largest_row
