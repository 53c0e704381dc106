"""Compute logits from the last hidden state as each model does: some models scale or cap them.

`engines.learn.fidelity` refuses a model that changes its logits in another way.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel


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

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits in float32. `outputs`: of the output layer."""
        logits = outputs.float()
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
