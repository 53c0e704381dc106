"""Log-probabilities agree with the model's own logits, including their scale and cap."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from refrain.engines.learn.attention import PACKED
from refrain.engines.learn.fidelity import check_fidelity
from refrain.engines.learn.head import Head
from refrain.engines.learn.packing import TokenSequence, pack
from refrain.engines.learn.policy import PolicyModel
from tests.learn.conftest import own_logprobs
from tests.learn.test_attention import SMALL

FALCON_H1 = {
    "lm_head_multiplier": 0.5,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
}
HEADS: dict[str, tuple[str, dict[str, Any], Head]] = {
    "tied": ("llama", {"tie_word_embeddings": True}, Head()),
    "untied": ("llama", {"tie_word_embeddings": False}, Head()),
    "capped": ("gemma2", {"final_logit_softcapping": 3.0}, Head(cap=3.0)),
    "capped beyond its logits": ("gemma2", {"final_logit_softcapping": 30.0}, Head(cap=30.0)),
    "not capped": ("gemma3_text", {}, Head()),
    "multiplied": ("cohere", {"logit_scale": 0.25}, Head(scale=0.25)),
    "divided": ("granite", {"logits_scaling": 8.0}, Head(scale=0.125)),
    "multiplied by the same name": ("hyperclovax", {"logits_scaling": 0.5}, Head(scale=0.5)),
    "multiplied by another name": ("falcon_h1", FALCON_H1, Head(scale=0.5)),
}


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    kind, changed, _ = HEADS[name]
    config = AutoConfig.for_model(kind, **SMALL | changed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_logprobs_are_those_of_the_models_own_logits(name: str) -> None:
    model = model_of(name)
    ids = np.random.default_rng(0).integers(1, 64, 40)
    expected = own_logprobs(model, ids, 0.7)
    model.set_attn_implementation(PACKED)
    policy = PolicyModel(model)
    assert policy._head == HEADS[name][2]
    (batch,) = pack([TokenSequence(ids.astype(np.int32), 1)], 256)
    found = policy.score(batch, temperature=0.7).logprobs
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_a_head_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with transformers finds even a cap far beyond the logits of a small model."""
    config = model_of("capped beyond its logits").config
    monkeypatch.setattr(Head, "of", lambda _: Head())
    with pytest.raises(ValueError, match="does not compute a gemma2 model as transformers does"):
        check_fidelity(config, 512)
