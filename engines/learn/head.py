"""Logits from the last hidden state, as each model makes them: some scale them, some cap them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines.learn.attention import SampleBounds

_LARGE = 100.0
"""Logits that a cap would show in."""


@dataclass(frozen=True, slots=True)
class Head:
    """Logits of a model: cap * tanh(scale * output layer(hidden) / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Head":
        """The head that the model's configuration says. Raises ValueError when the model's own
        logits are others."""
        said = model.config.get_text_config().to_dict()
        scale = said.get("logit_scale") or 1.0  # Cohere
        divisor = said.get("logits_scaling") or 1.0  # Granite, MiniCPM
        head = cls(scale / divisor, said.get("final_logit_softcapping") or None)  # Gemma
        head._check(model)
        return head

    def logits(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Logits in float32."""
        logits = model.get_output_embeddings()(hidden).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        """Compare with the model's own, on hidden states that are blown up: those of a tiny model
        would stay below its cap."""
        decoder: Any = model.get_decoder()
        input_ids = torch.arange(4)[None] % model.config.get_text_config().vocab_size
        segments = SampleBounds.of([4], model.device)
        given = {"input_ids": input_ids, "segments": segments, "use_cache": False}
        model.eval()
        hidden = decoder(**given).last_hidden_state
        hidden = hidden * (_LARGE / model.get_output_embeddings()(hidden).abs().max())

        def blow_up(*args: Any) -> Any:
            output = args[-1]
            output.last_hidden_state = hidden
            return output

        hook = decoder.register_forward_hook(blow_up)
        try:
            expected = model(**given).logits.float()
        finally:
            hook.remove()
        if not torch.allclose(self.logits(model, hidden), expected, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"{type(model).__name__} changes its logits after the output layer in a way that "
                "this trainer does not know: it knows logit_scale, logits_scaling and "
                "final_logit_softcapping of config.json"
            )
