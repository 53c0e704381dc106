"""Check, on a small copy of the model, that adapters reach engines and peft before a run starts.

    a model with adapters, filled at random     ◄─┐
    their merged weights in one without           ├─ the same logits in float32?
    the adapter, as peft reads it from its file ◄─┘

Example: Jamba reads the weight of `dt_proj` itself. An adapter of that weight would change nothing
in the trainer, but would change the engines.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import sqrt
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from refrain.engines.learn.lora import adapted_layers, adapter_tensors, add_adapters, base_tensors
from refrain.engines.learn.publishing import whole_tensors
from refrain.engines.learn.small_copy import small_copy
from refrain.engines.learn.weight_files import listed
from refrain.engines.user_files import first_line
from refrain.schemas.trainer import LoraConfig

SEEDS = (0, 1)
"""Seeds of weights. Adapters are refused only if every seed shows a fault: rounding alone may send
one token to another expert."""
_SETTING = "trainer.lora.target_modules"
_NUM_TOKENS = 32
"""Tokens of the scored sample."""
_TOLERANCE = 1e-3
"""Largest difference of logits, as a share of how much adapters change them."""
_ROUNDING = 10.0
"""The same, as a multiple of how much rounding changes them. Deep models amplify rounding."""
_NO_MATRICES = (nn.Embedding, nn.modules.conv._ConvNd)


@torch.no_grad()
@torch.random.fork_rng(devices=[])
def check_adapters(
    config: PretrainedConfig, lora: LoraConfig, *, trust_remote_code: bool = False
) -> tuple[str, ...]:
    """Add adapters to the model on the meta device, and to a small copy that computes with them.

    Returns notes about matrices that get no adapter, and about what could not be tried. Raises
    ValueError that names the layers whose adapters cannot be merged.
    """
    with torch.device("meta"):
        model = _Trial(config, trust_remote_code).made()
    add_adapters(model, lora)
    notes = tuple(_left_out(model)) if lora.target_modules == "all-linear" else ()
    try:
        small = small_copy(config, _NUM_TOKENS, trust_remote_code=trust_remote_code).config
        trial = _Trial(small, trust_remote_code)
        _logits(trial.made())
    except Exception as error:  # Each model checks its sizes in its own way.
        return (
            *notes,
            f"trainer.lora: adapters were not tried on a small copy: {first_line(error)}",
        )
    if why := trial.fault(lora):
        raise ValueError(f"{_SETTING}: {why}; {_advice(trial, lora, model)}")
    return notes


@dataclass(frozen=True, slots=True)
class _Trial:
    config: PretrainedConfig
    trust: bool

    def made(self, tensors: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
        """Create a model with these weights, or with new ones."""
        model = AutoModelForCausalLM.from_config(
            deepcopy(self.config), dtype=torch.float32, trust_remote_code=self.trust
        )
        model.load_state_dict(tensors or {}, strict=False)
        return model.eval()

    def fault(self, lora: LoraConfig, seeds: Sequence[int] = SEEDS) -> str | None:
        """Return what goes wrong with adapters on these layers, or None."""
        found = [self._fault(lora, seed) for seed in seeds]
        return found[0] if all(found) else None

    def _fault(self, lora: LoraConfig, seed: int) -> str | None:
        torch.manual_seed(seed)
        model = self.made()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        start = {name: tensor.clone() for name, tensor in base_tensors(model).items()}
        before, rounding = _logits(model), self._rounding(start)
        add_adapters(model, lora)
        for parameter in model.parameters():
            if parameter.requires_grad:  # Make the updates about as large as the weights.
                parameter.normal_(std=sqrt(0.125 * sqrt(lora.rank) / lora.alpha))
        try:
            expected = _logits(model)
        except Exception as error:  # A model may fail in any way on wrapped layers.
            return f"a small copy of the model fails with adapters ({first_line(error)})"
        most = max(_TOLERANCE * _mean(expected, before), _ROUNDING * rounding)
        merged = self.made(dict(whole_tensors(model, torch.float32).tensors))
        if not _mean(_logits(merged), expected) <= most:
            return "in a small copy of the model, merged weights give other logits than adapters"
        again = self.made(start)
        add_adapters(again, lora)
        report: Any = peft.set_peft_model_state_dict(again, adapter_tensors(model))
        if report.unexpected_keys or not _mean(_logits(again), expected) <= most:
            return "in a small copy of the model, peft does not read its adapter back"
        return None

    def _rounding(self, start: Mapping[str, Tensor]) -> float:
        """Return how much other rounding of the weights changes the logits."""
        eps = torch.finfo(torch.float32).eps
        other = {name: t * (1 + eps * torch.randn(t.shape)) for name, t in start.items()}
        return _mean(_logits(self.made(start)), _logits(self.made(other)))


def _mean(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())


def _logits(model: PreTrainedModel) -> Tensor:
    ids = torch.arange(_NUM_TOKENS)[None] % model.config.get_text_config().vocab_size
    return model(input_ids=ids, use_cache=False).logits


def _advice(trial: _Trial, lora: LoraConfig, model: PreTrainedModel) -> str:
    """Try the layers one by one, and say which to leave out."""
    given = lora.target_modules
    if isinstance(given, str):
        names = {name.split(".")[-2] for name in adapted_layers(model)}
    else:
        names = set(given)
    good, bad = [], []
    for name in sorted(names):
        one = lora.model_copy(update={"target_modules": (name,)})
        try:
            (bad if trial.fault(one, SEEDS[:1]) else good).append(name)
        except ValueError:  # Experts have other names here.
            continue
    if not bad or not good:
        return "train without trainer.lora"
    return f"leave out {', '.join(bad)}: {_SETTING}=[{', '.join(good)}]"


def _left_out(model: PreTrainedModel) -> Iterator[str]:
    """Yield a note about matrices without an adapter, if there are any."""
    head = model.get_output_embeddings()
    matrices = {
        f"{name}.{own}".replace(".base_layer", "")
        for name, module in model.named_modules()
        if module is not head and not isinstance(module, _NO_MATRICES) and ".lora_" not in name
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1
    }
    if names := matrices - adapted_layers(model).keys():
        told = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
        yield (
            f"{_SETTING}=all-linear leaves out {listed(told)}: peft has no adapters for these, so "
            "they are not trained"
        )
