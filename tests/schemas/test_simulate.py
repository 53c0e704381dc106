"""Layouts that do not fit a simulated cluster are refused."""

import pytest

from refrain.schemas.simulate import ClusterLayout


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"num_engines": 1, "tp_degree": 16}, "TP 16 does not fit a node of 8 GPUs"),
        ({"num_engines": 5, "tp_degree": 2, "num_gpus": 8}, "5 engines of TP 2 do not fit 8 GPUs"),
        ({"num_engines": 5, "tp_degree": 3, "num_gpus": 16}, "at most 4 do"),
        ({"num_engines": 0}, "greater than 0"),
    ],
)
def test_impossible_layouts(layout, message):
    with pytest.raises(ValueError, match=message):
        ClusterLayout(**layout)
