"""Our replacement of vLLM's samplers launches two kernels per step, and one that looks up drafts
if there are any. It never waits for the GPU.

Operations on meta tensors, which have no data, show this without a GPU.
"""

import pytest
import torch

from refrain.benchmarks.sampling import launches_of, step_of
from refrain.benchmarks.traffic import counted

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("drafted", [False, True])
def test_a_step_launches_few_kernels_and_waits_for_nothing(drafted: bool) -> None:
    assert launches_of(64, drafted) == ["aten::index"] * drafted + ["draw", "accept"]


def test_a_step_of_other_requests_copies_their_keys() -> None:
    with counted() as traffic:
        step_of(64, False, "meta")()
    assert traffic.launches.count("aten::_to_copy") == 1


def test_an_operation_that_waits_for_data_would_fail() -> None:
    """Negative control: an operation that needs data raises an error here."""
    with counted(), pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, device="meta").nonzero()
