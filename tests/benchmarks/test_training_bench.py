"""The training bench sorts operations by kind, and computes the share of each kind."""

import pyarrow as pa
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.training import KINDS, REST, _figures, kind_of, seconds_by_kind


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("aten::mm", "products"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_log_softmax", "head"),
        ("aten::exp", "head"),
        ("aten::expand", REST),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::linalg_vector_norm", "optimizer"),
        ("aten::_fused_rms_norm", REST),
        ("aten::copy_", "memory"),
        ("aten::index_add_", "memory"),
        ("aten::silu", REST),
        ("autograd::engine::evaluate_function: IndexBackward0", "memory"),
    ],
)
def test_an_operation_has_a_kind(operation, kind):
    assert kind_of(operation) == kind


def test_shares_are_of_all_that_a_step_does():
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        layer(torch.ones(64, 64)).log_softmax(-1).exp().mean().backward()
        optimizer.step()
    spent = seconds_by_kind(recorded)
    assert all(spent[kind] > 0 for kind in ("products", "head", "optimizer", "memory", REST))
    rows = [
        {"seconds": 2.0, "profiled": False},
        {"seconds": 3.0, "profiled": True, "products_alone": 0.5, **spent},
    ]
    figures = _figures(rows, pa.array([[1, 2, 3], [4]]))
    assert sum(figures[f"share_{kind}"] for kind in (*KINDS, REST)) == pytest.approx(1.0)
    assert (figures["tokens_per_s"], figures["products_floor"]) == (2.0, 0.25)
