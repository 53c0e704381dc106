"""The planned memory of a trainer rank agrees with the count of FSDP2's memory tracker."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from refrain.benchmarks.memory import CASES, PROMPT_TOKENS, RESPONSE_TOKENS, qwen3_config
from refrain.benchmarks.tracked_memory import track_peak
from refrain.engines.draft_head.model import DraftHead
from refrain.engines.latency.model_shape import SHAPES, ModelShape
from refrain.engines.learn.lora import add_adapters
from refrain.engines.machine.trainer_memory import (
    Training,
    adapter_params,
    draft_head_params,
    trainer_footprint,
    with_kept_layers,
)
from refrain.schemas.bench import BenchReport
from refrain.schemas.trainer import LoraConfig
from tests.conftest import REPOSITORY

SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 4096,
    "max_position_embeddings": 16_384,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
QWEN3_8B = ModelShape.from_hf_config(qwen3_config(SHAPES["Qwen3-8B"]), "Qwen3-8B")
WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 1024}
TIED_LLAMA = {"model_type": "llama", "tie_word_embeddings": True}
SMALL_CASES = {
    "Qwen3, most in the head": (SMALL, 4, (128, 896), True),
    "logits in chunks": (SMALL | {"vocab_size": 152_000}, 8, (512, 3584), True),
    "most in a layer": (SMALL, 4, (4000, 96), True),
    "most in the weights around the layers": (SMALL | {"vocab_size": 60_000}, 8, (60, 4), True),
    "nothing computed again": (SMALL, 4, (128, 896), False),
    "a rank alone": (SMALL, 1, (4000, 96), True),
    "experts": (SMALL | EXPERTS, 4, (1920, 128), True),
}
MORE_CASES = {
    "most in the weights of a layer": (SMALL | WIDE, 8, (60, 4), True),
    "no norms of queries, tied embeddings": (SMALL | TIED_LLAMA, 4, (1920, 128), False),
    "a rank alone, most in the head": (SMALL, 1, (128, 896), True),
    "a rank alone, nothing computed again": (SMALL | TIED_LLAMA, 1, (1024, 1024), False),
    "experts, nothing computed again": (SMALL | EXPERTS, 2, (1920, 128), False),
}
"""Cases that differ from those of `SMALL_CASES` in several ways at once."""


@pytest.mark.parametrize(
    "case", [*SMALL_CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)]
)
def test_the_plan_is_within_a_tenth_of_what_is_tracked(case: str) -> None:
    config, num_ranks, lengths, checkpointing = (SMALL_CASES | MORE_CASES)[case]
    tracked = track_peak(config, num_ranks, lengths, gradient_checkpointing=checkpointing)
    training = Training(num_ranks, sum(lengths), lengths[1], checkpointing)
    planned = trainer_footprint(ModelShape.from_hf_config(config), training)
    assert 0.9 < planned.tensor_bytes / tracked["Total"] < 1.1, (planned, tracked)


@pytest.mark.parametrize(
    ("changes", "checkpointing"),
    [
        ({"num_attention_heads": 16}, True),
        pytest.param({}, False, marks=pytest.mark.slow),
        pytest.param(TIED_LLAMA, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_a_row_are_planned_as_tracked(
    changes: dict[str, Any], checkpointing: bool
) -> None:
    """Four ranks share the query heads and two key heads, which are repeated."""
    config, tokens = SMALL | changes, 4 * 4096
    lengths = (tokens - 384, 384)
    tracked = track_peak(
        config, 4, lengths, gradient_checkpointing=checkpointing, context_parallel=4
    )
    training = Training(4, tokens // 4, 1, checkpointing, context_parallel=4)
    planned = trainer_footprint(ModelShape.from_hf_config(config), training)
    assert 0.98 < planned.tensor_bytes / tracked["Total"] < 1.02, (planned, tracked)


def test_layers_that_keep_their_activations_are_planned_as_tracked() -> None:
    tracked = track_peak(SMALL, 4, (128, 896), kept_layers=2)
    training = Training(4, 1024, 896, gradient_checkpointing=True, kept_layers=2)
    planned = trainer_footprint(ModelShape.from_hf_config(SMALL), training)
    assert 0.9 < planned.tensor_bytes / tracked["Total"] < 1.1, (planned, tracked)


def test_as_many_layers_as_fit_keep_their_activations() -> None:
    none = Training(4, 16_384, 8192, gradient_checkpointing=True)
    all_kept = replace(none, gradient_checkpointing=False)
    assert with_kept_layers(QWEN3_8B, none, 20e9) == none  # It does not fit in any case.
    some = with_kept_layers(QWEN3_8B, none, 80e9)
    assert 0 < some.kept_layers < QWEN3_8B.num_layers
    more = replace(some, kept_layers=some.kept_layers + 1)
    assert trainer_footprint(QWEN3_8B, some).bytes <= 80e9 < trainer_footprint(QWEN3_8B, more).bytes
    every = with_kept_layers(QWEN3_8B, none, 1e12)
    assert every.kept_layers == QWEN3_8B.num_layers
    assert trainer_footprint(QWEN3_8B, every) == trainer_footprint(QWEN3_8B, all_kept)


def test_planned_memory_is_within_a_tenth_of_tracked() -> None:
    """Tracking a large model takes minutes, so compare with the committed baseline."""
    file = REPOSITORY / "benchmarks" / "baselines" / "memory.json"
    report = BenchReport.model_validate_json(file.read_text())
    assert report.figures["peak_8b_4_ranks_gb"] < 72
    assert report.figures["peak_32b_16_ranks_gb"] < 72
    for row, (model, num_ranks) in zip(report.rows, CASES.values(), strict=True):
        assert (row["model"], row["num_ranks"]) == (model, num_ranks)
        tokens = PROMPT_TOKENS + RESPONSE_TOKENS
        training = Training(num_ranks, tokens, RESPONSE_TOKENS, gradient_checkpointing=True)
        planned = trainer_footprint(SHAPES[model], training)
        assert planned.tensor_bytes / 1e9 == pytest.approx(row["tracked_gb"], rel=0.1)


def test_the_benchs_models_are_those_of_their_shapes() -> None:
    assert SHAPES["Qwen3-8B"] == QWEN3_8B


def footprint(num_ranks: int = 4, tokens: int = 16_384, checkpointing: bool = True, **more: Any):
    return trainer_footprint(QWEN3_8B, Training(num_ranks, tokens, 8192, checkpointing, **more))


def test_settings_save_the_expected_memory() -> None:
    assert footprint(8).state_bytes == footprint(4).state_bytes / 2
    assert footprint(tokens=8192).kept_bytes == footprint().kept_bytes / 2
    assert footprint(checkpointing=False).bytes > footprint().bytes + 100e9
    weights = 4 * QWEN3_8B.num_params / 4
    assert footprint(reference_params=QWEN3_8B.num_params).bytes == footprint().bytes + weights
    assert "of the reference model" in str(footprint(reference_params=QWEN3_8B.num_params))


def test_8b_model_needs_four_80_gb_gpus() -> None:
    assert footprint().bytes < 72e9
    assert footprint(1).bytes > 131e9


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["qwen3", "qwen3_moe"])
def test_adapters_are_counted_as_peft_makes_them(changes: dict[str, Any]) -> None:
    config = SMALL | changes
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    add_adapters(model, LoraConfig(rank=4))
    made = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert made == adapter_params(ModelShape.from_hf_config(config, "small"), 4)


def test_a_draft_head_is_counted_as_it_is_made() -> None:
    num = sum(one.numel() for one in DraftHead(SMALL["hidden_size"], torch.arange(8)).parameters())
    assert num == draft_head_params(ModelShape.from_hf_config(SMALL, "small"))
    assert footprint(draft_head_params=num).bytes == footprint().bytes + 16 * num
