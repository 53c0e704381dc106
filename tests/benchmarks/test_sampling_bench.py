"""The bench of sampling counts what the kernels do on given logits."""

import torch

from refrain.benchmarks.traffic import count_kernels


def test_close_scores_cost_operations():
    """Parts whose best scores nearly tie compute more of them. Others compute one."""
    peaked, tied = torch.zeros(2, 4096)
    peaked[5] = peaked[4000] = 60.0
    tied[:8] = 3e7
    found = count_kernels(torch.stack([peaked, tied]))
    assert found.skipped_share == (1.0 + 0.5) / 2
    assert found.num_operations / 4096 > 60
    # Each logit, and a few numbers per part.
    assert 4.0 < found.num_bytes / 4096 < 4.1
