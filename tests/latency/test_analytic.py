"""The analytic model behaves plausibly in limits, and predicts times that the papers print."""

import math

import numpy as np
import pytest

from refrain.engines.latency.analytic import AnalyticLatency
from refrain.engines.latency.hardware import A40, H100, HARDWARE
from refrain.engines.latency.model_shape import SHAPES, ModelShape
from tests.latency.paper_latencies import PRINTED, PRINTED_TFLOPS_PER_GPU, Measured, Printed

LLAMA = SHAPES["LLaMA3.1-8B"]
LLAMA_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("LLaMA3.1-8B", 8.03),
        ("Qwen3-8B", 8.19),
        ("Qwen3-14B", 14.77),
        ("Qwen3-32B", 32.76),
        ("Qwen2.5-32B", 32.76),
        ("Qwen2.5-1.5B", 1.54),
        ("Qwen2.5-0.5B", 0.494),
        ("Qwen3-235B-A22B", 235.09),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, billions):
    assert SHAPES[name].num_params / 1e9 == pytest.approx(billions, rel=0.003)


def test_a_shape_is_read_from_a_hugging_face_configuration():
    assert ModelShape.from_hf_config(LLAMA_CONFIG, name="LLaMA3.1-8B") == LLAMA
    without_groups = {k: v for k, v in LLAMA_CONFIG.items() if k != "num_key_value_heads"}
    assert ModelShape.from_hf_config(without_groups).num_kv_heads == 32
    in_float32 = ModelShape.from_hf_config(LLAMA_CONFIG | {"torch_dtype": "float32"})
    assert in_float32.weight_bytes == 2 * LLAMA.weight_bytes
    with pytest.raises(ValueError, match="lacks num_hidden_layers, hidden_size"):
        ModelShape.from_hf_config({"num_attention_heads": 2})
    with pytest.raises(ValueError, match="n_routed_experts is set"):
        ModelShape.from_hf_config(LLAMA_CONFIG | {"n_routed_experts": 128})


def test_a_mixture_holds_all_experts_and_works_with_some():
    config = LLAMA_CONFIG | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    mixture = ModelShape.from_hf_config(config, "Qwen3-30B-A3B")
    assert mixture == SHAPES["Qwen3-30B-A3B"]
    assert mixture.num_params / 1e9 == pytest.approx(30.5, rel=0.003)
    active = mixture.active_layer_params + 2 * mixture.head_params
    assert active / 1e9 == pytest.approx(3.3, rel=0.02)
    assert AnalyticLatency(mixture, H100).prefill_s(1, 64, 1024) < 0.5 * AnalyticLatency(
        SHAPES["Qwen3-32B"], H100
    ).prefill_s(1, 64, 1024)


def test_mixture_step_reads_only_the_used_experts():
    mixture, rng = SHAPES["Qwen3-30B-A3B"], np.random.default_rng(0)
    expert = mixture.num_layers * 3 * mixture.hidden_size * mixture.intermediate_size
    rest = mixture.active_layer_params + mixture.head_params - 8 * expert
    for num_tokens in (1, 5, 64):
        routed = rng.random((500, num_tokens, mixture.num_experts)).argpartition(7)[..., :8]
        num_experts = np.mean([len(np.unique(of_step)) for of_step in routed])
        read = 2 * (rest + num_experts * expert)
        assert mixture.step_bytes(num_tokens) == pytest.approx(read, rel=0.01)
    everything = 2 * (mixture.layer_params + mixture.head_params)
    assert mixture.step_bytes(10_000) == pytest.approx(everything)


def test_drafts_cost_mixtures_more_than_dense_models():
    def verifying_over_decoding(name: str) -> float:
        latency = AnalyticLatency(SHAPES[name], H100)
        return latency.verify_s(1, 1, 1, 4) / latency.decode_s(1, 1, 1)

    assert verifying_over_decoding("Qwen3-32B") < 1.01
    assert verifying_over_decoding("Qwen3-30B-A3B") > 1.5


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
def test_a_small_step_takes_the_time_to_read_the_weights(hardware):
    bandwidth = hardware.memory_bytes_per_s * hardware.memory_share
    read_s = 2 * (LLAMA.num_params - LLAMA.head_params) / bandwidth
    decode_s = AnalyticLatency(LLAMA, hardware).decode_s(1, 1, 1)
    assert decode_s - hardware.step_overhead_s == pytest.approx(read_s, rel=1e-3)
    more = AnalyticLatency(LLAMA, hardware).decode_s(1, 1, 10_000) - decode_s
    assert more == pytest.approx(9_999 * LLAMA.kv_bytes_per_token / bandwidth)


def test_tp_helps_large_batches_on_nvlink_and_less_on_pcie():
    gains = {}
    for hardware in (H100, A40):
        latency = AnalyticLatency(LLAMA, hardware)
        times = [latency.decode_s(tp, 256, 256 * 2048) for tp in (1, 2, 4, 8)]
        assert times == sorted(times, reverse=True)
        gains[hardware.name] = times[0] / times[-1]
    assert gains["H100"] > 4
    assert gains["A40"] < gains["H100"] - 1


def test_verification_is_nearly_free_until_computation_binds():
    latency = AnalyticLatency(LLAMA, H100)
    assert latency.verify_s(1, 1, 2048, 4) < 1.01 * latency.decode_s(1, 1, 2048)
    assert latency.verify_s(1, 256, 256 * 2048, 4) > 1.2 * latency.decode_s(1, 256, 256 * 2048)
    assert latency.verify_s(1, 7, 900, 0) == latency.decode_s(1, 7, 900)


def test_shared_kv_heads_stop_scaling():
    latency = AnalyticLatency(SHAPES["Qwen2.5-1.5B"], H100)
    context_s = [
        latency.decode_s(tp, 1, 1e6) - latency.decode_s(tp, 1, 0) for tp in (1, 2, 4)
    ]  # 2 KV heads
    assert context_s[0] / context_s[1] == pytest.approx(2)
    assert context_s[1] == pytest.approx(context_s[2])


def test_the_kv_cache_holds_what_pat_allows():
    """PAT 4.2: 2^20 active tokens on 8 A40 are "conservative"."""
    latency = AnalyticLatency(LLAMA, A40)
    assert 2**20 < 4 * latency.kv_capacity_tokens(2) < latency.kv_capacity_tokens(8)
    assert AnalyticLatency(SHAPES["Qwen2.5-32B"], A40).kv_capacity_tokens(1) == 0


def test_impossible_layouts_and_unknown_drafters_are_refused():
    latency = AnalyticLatency(LLAMA, A40, {"ngram": 1e-6})
    with pytest.raises(ValueError, match="between 1 and the 8 GPUs of one A40 node"):
        latency.decode_s(16, 1, 1)
    with pytest.raises(ValueError, match="14 attention heads, which tp_degree 4 does not divide"):
        AnalyticLatency(SHAPES["Qwen2.5-0.5B"], H100).decode_s(4, 1, 1)
    with pytest.raises(ValueError, match="no drafter 'eagle'; known: ngram"):
        latency.draft_s("eagle", 1, 2)
    with pytest.raises(ValueError, match="needs tokens"):
        latency.decode_s(1, 0, 0)
    with pytest.raises(ValueError, match="draft window"):
        latency.verify_s(1, 1, 1, -1)


# The free values of the A40 were fitted to figure 4, whose unknown context is assumed to be 2048
# tokens per sample. All other times are predictions.


def printed(what: Measured, **fields) -> list[Printed]:
    found = [p for p in PRINTED if p.what is what]
    return [p for p in found if all(getattr(p, k) == v for k, v in fields.items())]


def label(row: Printed) -> str:
    return f"{row.model}-{row.hardware}-tp{row.tp_degree}-batch{row.global_batch}"


def latency_of(row: Printed) -> AnalyticLatency:
    return AnalyticLatency(SHAPES[row.model], HARDWARE[row.hardware])


@pytest.mark.parametrize("row", printed(Measured.DECODE_STEP, hardware="A40"), ids=label)
def test_calibration_pat_figure_4_within_5_percent(row):
    batch = math.ceil(row.global_batch * row.tp_degree / row.num_gpus)
    assert latency_of(row).decode_s(row.tp_degree, batch, batch * 2048) == pytest.approx(
        row.seconds, rel=0.05
    )


def test_prediction_pat_tflops_within_10_percent_at_tp_2():
    """PAT 2.3 does not print the TP degree. "aligned" is computed for the first tokens, and "tail"
    for half of 16K."""
    latency = AnalyticLatency(LLAMA, A40)
    flops_per_token = 2 * (LLAMA.layer_params + LLAMA.head_params) / 8
    aligned = 128 * flops_per_token / latency.decode_s(2, 32, 32 * 512) / 1e12
    tail = flops_per_token / latency.decode_s(2, 1, 8192) / 1e12
    assert aligned == pytest.approx(PRINTED_TFLOPS_PER_GPU["aligned"], rel=0.1)
    assert tail == pytest.approx(PRINTED_TFLOPS_PER_GPU["tail"], rel=0.1)


def test_prediction_pat_recomputation_within_30_percent():
    """The model predicts 14.2 s, PAT prints 19.01 s: real prefill runs in chunks, below the
    assumed share of the peak."""
    (row,) = printed(Measured.PREFILL)
    predicted = latency_of(row).prefill_s(row.tp_degree, row.global_batch, row.context_tokens_each)
    assert predicted < row.seconds
    assert predicted == pytest.approx(row.seconds, rel=0.3)
