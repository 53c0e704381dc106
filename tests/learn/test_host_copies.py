"""`HostCopies` moves tensors to host memory, frees their own memory, and restores them."""

import pytest
import torch

from refrain.engines.learn.host_copies import HostCopies


def test_restored_tensors_equal_offloaded_ones():
    weights = torch.randn(17, 5)
    part = weights[3:9, 1:]
    moments = torch.randn(3).to(torch.bfloat16)
    before = [weights.clone(), part.clone(), moments.clone()]
    copies = HostCopies()
    for _ in range(2):
        copies.offload([weights, part, moments, torch.empty(0)])
        assert [t.untyped_storage().nbytes() for t in (weights, part, moments)] == [0, 0, 0]
        copies.restore()
        assert all(map(torch.equal, before, [weights, part, moments]))
    assert part.data_ptr() == weights[3:9, 1:].data_ptr()


def test_host_memory_is_taken_once():
    tensor, copies = torch.randn(1000), HostCopies()
    kept = []
    for _ in range(3):
        copies.offload([tensor])
        copies.restore()
        kept.append([buffer.data_ptr() for buffer in copies._buffers.values()])
    assert kept[0] == kept[1] == kept[2]


def test_optimiser_continues_with_its_tensors():
    def updates(leave):
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8)
        optimiser = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
        copies = HostCopies()
        for _ in range(3):
            layer(torch.ones(2, 8)).square().sum().backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            if leave:
                states = optimiser.state.values()
                copies.offload([*layer.parameters(), *(s["exp_avg"] for s in states)])
                copies.restore()
        return layer.weight

    assert torch.equal(updates(leave=True), updates(leave=False))


def test_leaving_twice_is_a_bug():
    copies, tensor = HostCopies(), torch.ones(3)
    copies.offload([tensor])
    with pytest.raises(AssertionError, match="have left"):
        copies.offload([tensor])
