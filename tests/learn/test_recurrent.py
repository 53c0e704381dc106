"""Samples of recurrent models share a row if the kernels start anew at each sample.

The kernels of flash-linear-attention and causal-conv1d need a GPU. Those below have their arguments
and do what they document, by the torch versions of transformers, sample by sample.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from refrain.engines.learn.packing import pack
from refrain.engines.learn.policy import PolicyModel, score_sequences
from refrain.engines.learn.recurrent import has_recurrent_layers, recurrent_bounds
from refrain.engines.learn.sample_isolation import keeps_samples_apart
from tests.learn.test_sample_isolation import (
    HYBRIDS,
    config_of,
    policy_of,
    sequences_of,
)

Kernel = Callable[..., Any]
MODULES = {"lfm2": modeling_lfm2, "qwen3_next": modeling_qwen3_next}
KERNELS = {
    "lfm2": ["causal_conv1d_fn"],
    "qwen3_next": ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"],
}


def convolution(plain: Kernel) -> Kernel:
    """Return causal-conv1d's function: a token sees earlier ones of its sample, by `seq_idx`."""

    def kernel(x: Tensor, *args: Any, seq_idx: Tensor, **more: Any) -> Tensor:
        assert (seq_idx.dtype, seq_idx.shape) == (torch.int32, (1, x.shape[-1]))
        _, num_tokens = torch.unique_consecutive(seq_idx[0], return_counts=True)
        parts = x.split(num_tokens.tolist(), dim=-1)
        return torch.cat([plain(part, *args, **more) for part in parts], dim=-1)

    return kernel


def delta_rule(plain: Kernel) -> Kernel:
    """Return fla's function: the state is zero at each of `cu_seqlens`."""

    def kernel(*tensors: Tensor, cu_seqlens: Tensor, **more: Any) -> tuple[Tensor, None]:
        assert cu_seqlens.dtype == torch.int32
        gates = {name: more.pop(name) for name in ("g", "beta")}
        outputs = [
            plain(
                *(one[:, start:end] for one in tensors),
                **{name: one[:, start:end] for name, one in gates.items()},
                **{name: one for name, one in more.items() if name != "seq_idx"},
            )[0]
            for start, end in pairwise(cu_seqlens.tolist())
        ]
        return torch.cat(outputs, dim=1), None

    return kernel


MAKERS = {"causal_conv1d_fn": convolution, "torch_chunk_gated_delta_rule": delta_rule}


@pytest.fixture(params=MODULES)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Provide a kind of model whose kernels know the bounds of samples."""
    module = MODULES[request.param]
    for name in KERNELS[request.param]:
        monkeypatch.setattr(module, name, MAKERS[name](getattr(module, name)))
    return request.param


def test_samples_share_a_row(kind: str) -> None:
    policy = policy_of(kind)
    assert keeps_samples_apart(policy, torch.float32)
    sequences = sequences_of([40, 33, 17, 5])
    together = score_sequences(policy, sequences, 256, 1.0)
    policy.alone = True
    alone = score_sequences(policy, sequences, 256, 1.0)
    for found, own in zip(together, alone, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-4)


def test_gradients_are_those_of_rows_of_one_sample(kind: str) -> None:
    together, alone = policy_of(kind), policy_of(kind)
    alone.alone = True
    sequences = sequences_of([40, 33, 17, 5])
    expected, found = (gradients(policy, sequences) for policy in (alone, together))
    for own, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, own, atol=1e-3, rtol=1e-3)


def gradients(policy: PolicyModel, sequences: list[Any]) -> list[Tensor]:
    """Return the gradients of the sum of all log-probabilities."""
    for batch in pack(sequences, 256, alone=policy.alone):
        policy.score(batch, 1.0).logprobs.sum().backward()
    return [one.grad for one in policy.parameters() if one.grad is not None]


@pytest.mark.parametrize("forgotten", ["cu_seqlens", "seq_idx"])
def test_kernels_without_one_of_the_bounds_are_found_out(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: only one of the two packages is installed."""
    name = "torch_chunk_gated_delta_rule" if forgotten == "seq_idx" else "causal_conv1d_fn"
    module = modeling_qwen3_next
    monkeypatch.setattr(module, name, MAKERS[name](getattr(module, name)))
    assert not keeps_samples_apart(policy_of("qwen3_next"), torch.float32)


def test_which_models_are_recurrent() -> None:
    assert all(has_recurrent_layers(config_of(kind)) for kind in HYBRIDS)
    assert not has_recurrent_layers(config_of("qwen3"))


def test_bounds_as_arguments() -> None:
    found = recurrent_bounds(torch.tensor([0, 3, 5], dtype=torch.int32), 5)
    assert found["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert found["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]
