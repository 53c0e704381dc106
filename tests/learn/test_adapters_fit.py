"""A run does not start with adapters that engines or peft would compute wrong."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from refrain.engines.learn import adapters_fit
from refrain.engines.learn.adapters_fit import check_adapters
from refrain.schemas.inputs import ModelConfig
from refrain.schemas.trainer import LoraConfig
from refrain.tasks.run.model_inputs import check_lora
from tests.learn.test_attention import SMALL
from tests.learn.test_lora_kinds import ENDS, KINDS, made

JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
JAMBA |= {"expert_layer_offset": 1, "num_experts": 4, "use_mamba_kernels": False}
OTHERS = {"jamba": JAMBA, "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 64}}


def check(kind: str, targets: Any) -> tuple[str, ...]:
    config = AutoConfig.for_model(kind, **SMALL | (KINDS | OTHERS)[kind])
    return check_adapters(config, LoraConfig(rank=4, target_modules=targets))


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("qwen3_moe", "all-linear"), ("mixtral", "all-linear"), ("llama", (*ENDS, "q_proj"))],
)
def test_correctly_merged_adapters_pass(kind: str, targets: Any) -> None:
    assert check(kind, targets) == ()


@pytest.mark.parametrize(
    ("kind", "targets", "said"),
    [
        # Jamba's layer reads the weight of dt_proj directly, past the adapter.
        ("jamba", "all-linear", r"merged weights give other .* leave out dt_proj: .*=\[down"),
        ("jamba", ("dt_proj",), "merged weights give other .* train without trainer.lora"),
        # The router is a linear layer that returns two tensors.
        ("llama4_text", "all-linear", r"fails with adapters .* leave out router: .*=\[down"),
    ],
)
def test_wrongly_merged_adapters_are_refused_by_layer(kind: str, targets: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.lora.target_modules: .*{said}"):
        check(kind, targets)


def test_an_adapter_that_peft_does_not_read_back_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = adapters_fit.adapter_tensors
    monkeypatch.setattr(
        adapters_fit,
        "adapter_tensors",
        lambda model: {name.replace("experts.", "mlp."): t for name, t in tensors(model).items()},
    )
    with pytest.raises(ValueError, match="peft does not read its adapter back"):
        check("qwen3_moe", ("down_proj",))


def test_layers_that_all_linear_leaves_out_are_named() -> None:
    (said,) = check("qwen2_moe", "all-linear")
    assert "leaves out model.layers.*.mlp.experts.down_proj, " in said


def test_a_directory_is_checked_by_the_names_of_its_files(tmp_path: Path) -> None:
    model = ModelConfig(path=made("mixtral", tmp_path))
    assert check_lora(model, None) == ()
    assert check_lora(model, LoraConfig(target_modules=("w1", "w2", "w3", "lm_head"))) == ()
    with pytest.raises(ValueError, match=r"called gate_proj; it has .*w1"):
        check_lora(model, LoraConfig(target_modules=("gate_proj",)))
