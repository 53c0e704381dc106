"""Memory for parked engines: the sum of its parts, whether they keep their weights, and errors with
figures when it does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.latency.hardware import A40, H100
from refrain.engines.latency.model_shape import SHAPES
from refrain.engines.pat.memory import (
    CPU_PROCESS_BYTES,
    PARKED_BYTES,
    USABLE_SHARE,
    WORKING_BYTES,
    gpu_footprint,
    host_footprint,
    plan_parked_weights,
    require_host_memory,
)
from tests.pat.standby import compare_standby

LLAMA, QWEN = SHAPES["LLaMA3.1-8B"], SHAPES["Qwen3-14B"]
GB = 1e9


def test_a_gpu_by_hand():
    resident = gpu_footprint(16 * GB, (2, 4, 8), 20 * GB, resident=True)
    assert resident.weights_bytes == (8 + 4 + 2) * GB
    assert resident.bytes == 14 * GB + 20 * GB + WORKING_BYTES + 2 * PARKED_BYTES
    reloaded = gpu_footprint(16 * GB, (2, 4, 8), 20 * GB, resident=False)
    assert reloaded.weights_bytes == 8 * GB


def test_a_host_by_hand():
    """Two processes: two copies of the weights at TP 1, one at TP 2, and a KV cache for each."""
    host = host_footprint(1 * GB, (1, 2), 0.25 * GB, 2)
    assert host.weights_bytes == 3 * GB
    assert host.bytes == 3 * GB + 4 * (0.25 * GB + CPU_PROCESS_BYTES)


weights = st.floats(1, 200).map(lambda gb: gb * GB)
caches = st.floats(0, 60).map(lambda gb: gb * GB)


@given(weights, caches, st.sampled_from([(2, 4), (2, 8), (1, 2, 4, 8)]))
def test_weights_stay_only_if_memory_allows(weight_bytes, kv, degrees):
    kept, loaded = (
        gpu_footprint(weight_bytes, degrees, kv, resident=resident).bytes
        for resident in (True, False)
    )
    assert loaded < kept
    # Test just enough memory, and just too little.
    assert plan(weight_bytes, degrees, kv, kept * 1.001) == "resident"
    assert plan(weight_bytes, degrees, kv, max(loaded * 1.001, kept * 0.99)) == "reloaded"
    with pytest.raises(ValueError, match=r"need .* GB of each GPU .* only .* GB can be used"):
        plan(weight_bytes, degrees, kv, loaded * 0.999)


def plan(weight_bytes, degrees, kv, usable):
    return plan_parked_weights(weight_bytes, degrees, kv, usable / USABLE_SHARE)


def test_refusal_has_figures_and_a_fix():
    with pytest.raises(ValueError, match="tp_degrees") as refusal:
        plan_parked_weights(LLAMA.weight_bytes, (2, 4, 8), 60 * GB, A40.memory_bytes)
    assert str(refusal.value) == (
        "pat.tp_degrees: engines of TP degree 2, 4, 8 on the same GPUs need 74.4 GB of each GPU "
        "(8.0 GB of weights, 60.0 GB of KV cache and 6.4 GB of processes), but only 45.6 GB can be "
        "used. Take fewer pat.tp_degrees, a smaller rollout.kv_cache_bytes or a higher "
        "rollout.tp_degree"
    )


def test_a_host_without_memory_is_refused():
    require_host_memory(1 * GB, (1, 2), 0.25 * GB, 2, 8 * GB)
    with pytest.raises(ValueError, match=r"on a CPU need 6\.4 GB .*, but only 5\.7 GB"):
        require_host_memory(1 * GB, (1, 2), 0.25 * GB, 2, 6 * GB)


def test_standby_costs_on_the_machines_of_pat():
    (tp4, tp8) = compare_standby(LLAMA, A40, (2, 4, 8))
    assert tp8.resident_bytes == pytest.approx(16.06e9 / 8 + 1.2e9, rel=0.01)
    assert (tp4.resident_share + tp8.resident_share) == pytest.approx(0.18, abs=0.01)
    # PAT prints 1.03 s (figure 12).
    assert tp8.reshard_s == pytest.approx(1.59, abs=0.01)
    (fast,) = compare_standby(QWEN, H100, (2, 8))
    assert fast.resident_share < 0.07
    assert fast.reshard_s < 0.1 < fast.reload_s
