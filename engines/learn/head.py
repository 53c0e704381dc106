"""Compute logits from the last hidden state as each model does: some models scale or cap them."""

from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

_LARGE = 100.0
"""Size of the test logits, large enough for any cap to show."""
_SMALL = {
    "num_hidden_layers": 1,
    "layer_types": lambda types: types[:1],
    "vocab_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
"""Small values for configuration fields that do not affect the head."""


@dataclass(frozen=True, slots=True)
class Head:
    """A model's logits: cap * tanh(scale * output layer(hidden) / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Head":
        """Return the head that a model's configuration describes."""
        said = config.get_text_config().to_dict()
        # Cohere and Falcon-H1 multiply. Granite and MiniCPM divide by `logits_scaling`, while
        # HyperCLOVA X multiplies by it.
        scale = said.get("logit_scale") or said.get("lm_head_multiplier") or 1.0
        scaling = said.get("logits_scaling") or 1.0
        scale = scale * scaling if said["model_type"] == "hyperclovax" else scale / scaling
        # Gemma and RecurrentGemma.
        cap = said.get("final_logit_softcapping") or said.get("logits_soft_cap")
        return cls(scale, cap or None)

    def logits(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Return the logits in float32."""
        logits = model.get_output_embeddings()(hidden).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the part of a model that computes hidden states. Raise ValueError if there is none."""
    decoder: Any = model.get_decoder()
    if decoder is model or not isinstance(decoder, PreTrainedModel):
        decoder = getattr(model, "model", None)  # Some models return the wrong part.
    if decoder is None:
        raise ValueError(f"{type(model).__name__} has no decoder separate from its output layer")
    return decoder


@torch.no_grad()
def check_head(config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Compare `Head` with a small model's own logits, and raise ValueError if they differ. The
    hidden states are scaled up, because small ones would stay below a cap."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            _shrunk(config), dtype=torch.float32, trust_remote_code=trust_remote_code
        ).eval()
    given = {"input_ids": torch.arange(4)[None], "use_cache": False}
    decoder = decoder_of(model)
    hidden = decoder(**given).last_hidden_state
    hidden = hidden * (_LARGE / model.get_output_embeddings()(hidden).abs().max())

    def blow_up(*args: Any) -> Any:
        output = args[-1]
        output.last_hidden_state = hidden
        return output

    decoder.register_forward_hook(blow_up)
    expected = model(**given).logits.float()
    if not torch.allclose(Head.of(config).logits(model, hidden), expected, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output layer in a way that "
            "this trainer does not know. It knows logit_scale, logits_scaling, lm_head_multiplier, "
            "final_logit_softcapping and logits_soft_cap of config.json"
        )


def _shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration with one layer, few tokens and few experts, but the same width."""
    small = deepcopy(config)
    text = small.get_text_config()
    for name, value in _SMALL.items():
        given = getattr(text, name, None)
        if given is not None:
            with suppress(AttributeError):  # Some fields are computed from others.
                setattr(text, name, value(given) if callable(value) else value)
    return small
