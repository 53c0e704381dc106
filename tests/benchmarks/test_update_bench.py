"""The bench of updates counts what Inductor fuses, and its baseline is what the product aims at."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from refrain.benchmarks.fused_kernels import FusedKernels
from refrain.benchmarks.operations import Traffic
from refrain.schemas.bench import BenchReport
from tests.conftest import REPOSITORY


def gated(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return (torch.nn.functional.silu(gate) * up) @ weight


def test_operations_that_are_fused_count_once() -> None:
    """Eagerly, silu and the product each read and write a tensor of their own."""
    eager, fused = Traffic(), Traffic()
    compiled = torch.compile(gated, backend=FusedKernels(fused), dynamic=True)
    with FakeTensorMode():
        gate, up = torch.empty(128, 64), torch.empty(128, 64)
        weight = torch.empty(64, 32)
        with eager:
            gated(gate, up, weight)
        with fused:
            compiled(gate, up, weight)
            compiled(gate, up, weight)
    wide, product = 4 * 128 * 64, 4 * (128 * 64 + 64 * 32 + 128 * 32)
    assert (len(eager.launches), eager.num_bytes) == (3, 5 * wide + product)
    assert fused.launches == 2 * ["fused", "extern_kernels.mm"]
    assert fused.num_bytes == 2 * (3 * wide + product)


def test_a_compiled_layer_takes_half_the_launches_and_bytes() -> None:
    """Counting a layer takes a minute, so look at the committed baseline."""
    file = REPOSITORY / "benchmarks" / "baselines" / "update.json"
    figures = BenchReport.model_validate_json(file.read_text()).figures
    assert figures["launches_over_before"] <= 0.5
    assert figures["bytes_over_before"] <= 0.5
