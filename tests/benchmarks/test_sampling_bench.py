"""The bench of sampling counts what the kernels do on given logits."""

import torch

from refrain.benchmarks.traffic import count_kernels


def test_close_scores_cost_operations():
    """Parts whose best scores nearly tie compute more of them. Others compute one."""
    peaked = torch.zeros(1, 4096)
    peaked[0, 5] = peaked[0, 4000] = 60.0
    tied = torch.zeros(1, 4096)
    tied[0, :8] = 3e7
    one, many = count_kernels(peaked), count_kernels(tied)
    assert (one.skipped_share, many.skipped_share) == (1.0, 0.5)
    assert 40 < one.num_operations / 4096 < 60 < many.num_operations / 4096
    # Each logit, and a few numbers per part.
    assert 4.0 < one.num_bytes / 4096 < 4.1
