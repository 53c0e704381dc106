"""Shards of a model: their shapes, and that a shard's time plus the all-reduces equals the time of
all ranks."""

import pytest

from refrain.engines.latency.analytic import AnalyticLatency
from refrain.engines.latency.hardware import HARDWARE
from refrain.engines.latency.model_shape import ModelShape
from refrain.engines.latency.shards import shard_config, whole_latency, with_all_reduces
from refrain.schemas.latency import PointKind, ProfilePoint
from tests.latency.test_analytic import LLAMA_CONFIG

MIXTURE = LLAMA_CONFIG | {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def shape_of(config):
    return ModelShape.from_hf_config(config)


@pytest.mark.parametrize("tp_degree", [2, 4, 8])
def test_shards_together_are_the_model(tp_degree):
    whole, shard = shape_of(LLAMA_CONFIG), shape_of(shard_config(LLAMA_CONFIG, tp_degree))
    assert shard.head_dim == whole.head_dim
    assert shard.hidden_size == whole.hidden_size
    for name in ("layer_params", "head_params", "kv_bytes_per_token"):
        assert tp_degree * getattr(shard, name) == getattr(whole, name)


def test_of_a_mixture_each_expert_is_divided():
    shard = shape_of(shard_config(MIXTURE, 4))
    assert (shard.num_experts, shard.experts_per_token, shard.intermediate_size) == (128, 8, 192)


def test_ranks_that_share_a_kv_head_have_it_each():
    config = LLAMA_CONFIG | {"num_key_value_heads": 2}
    assert [shard_config(config, tp)["num_key_value_heads"] for tp in (2, 4, 8)] == [1, 1, 1]


def test_a_vocabulary_that_is_not_divided_evenly_is_padded():
    assert shard_config(LLAMA_CONFIG | {"vocab_size": 128_257}, 8)["vocab_size"] == 16_033


@pytest.mark.parametrize(
    ("changes", "tp_degree", "message"),
    [
        ({"model_type": "qwen2"}, 2, "shards of qwen2 models cannot be measured"),
        ({}, 3, r"TP 3 does not divide num_attention_heads \(32\)"),
        ({"intermediate_size": 14_337}, 2, r"does not divide intermediate_size \(14337\)"),
        ({"num_key_value_heads": 6}, 4, r"does not divide num_key_value_heads \(6\)"),
    ],
)
def test_models_without_shards_are_refused(changes, tp_degree, message):
    with pytest.raises(ValueError, match=message):
        shard_config(LLAMA_CONFIG | changes, tp_degree)


def test_hardware_without_a_data_sheet_is_refused():
    with pytest.raises(ValueError, match="no data sheet of 'abacus'; known: A40, H100, H200"):
        whole_latency(LLAMA_CONFIG, "abacus")


@pytest.mark.parametrize("hardware", sorted(HARDWARE))
@pytest.mark.parametrize("tp_degree", [2, 8])
def test_a_shard_and_its_all_reduces_take_what_all_ranks_take(hardware, tp_degree):
    """The analytic model of the shard, with all-reduces, equals that of the whole model."""
    whole = whole_latency(LLAMA_CONFIG, hardware)
    shard = AnalyticLatency(shape_of(shard_config(LLAMA_CONFIG, tp_degree)), HARDWARE[hardware])
    at = {"tp_degree": tp_degree, "batch": 64}
    points = {
        PointKind.DECODE: ({"context_tokens": 128_000}, shard.decode_s(1, 64, 128_000)),
        PointKind.VERIFY: (
            {"context_tokens": 128_000, "window": 4},
            shard.verify_s(1, 64, 128_000, 4),
        ),
        PointKind.PREFILL: ({"rms_tokens": 500.0}, shard.prefill_s(1, 64, 500.0)),
    }
    expected = {
        PointKind.DECODE: whole.decode_s(tp_degree, 64, 128_000),
        PointKind.VERIFY: whole.verify_s(tp_degree, 64, 128_000, 4),
        PointKind.PREFILL: whole.prefill_s(tp_degree, 64, 500.0),
    }
    for kind, (fields, seconds) in points.items():
        measured = ProfilePoint(kind=kind, seconds=seconds, **at, **fields)
        assert with_all_reduces(measured, whole).seconds == pytest.approx(expected[kind], rel=1e-6)
        assert with_all_reduces(measured, whole).seconds > seconds


def test_single_rank_and_drafting_have_no_all_reduce():
    whole = whole_latency(LLAMA_CONFIG, "H100")
    alone = ProfilePoint(kind=PointKind.DECODE, batch=4, context_tokens=100, seconds=0.01)
    drafting = ProfilePoint(
        kind=PointKind.DRAFT, tp_degree=2, batch=4, window=2, drafter="ngram", seconds=0.01
    )
    assert with_all_reduces(alone, whole) == alone
    assert with_all_reduces(drafting, whole) == drafting
