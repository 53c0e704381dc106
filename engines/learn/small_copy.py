"""A small copy of a model's configuration: few, narrow layers that keep every feature of the model.

    widths, heads, experts, ranks    small, with their ratios kept
    windows, chunks, rope switches   short, in the same order as each other and as the run's longest
                                     sample
    layers                           one of each kind, two at least
    all other fields                 unchanged

Fields are recognised by their names in transformers' configurations.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

LENGTH = 96
"""Tokens of the shortest window, context or chunk in the copy. Each next length is longer by this
number. It exceeds the lengths that `engines.learn.sample_isolation` tries, as in a real model."""
VOCABULARY = 64
FEW_LAYERS = 8
"""Take this many first layers as they are. If a model needs more, take one layer of each kind."""
_NO_LENGTH = 8
"""Largest window that is not changed."""

_LAYERS = re.compile(
    r"(num_(hidden_|decoder_|encoder_)?layers|n_layers?|(de|en)coder_layers|num_blocks"
    r"|num_layers_per_stack)$"
)
_FIRST_LAYERS = re.compile(
    r"(first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_(start|end)_index)$"
)
"""Fields that count the first layers of a kind."""
_LAST_LAYERS = re.compile(r"num_kv_shared_layers$")
_LAYER_NUMBERS = re.compile(r"layer|idx|indices|_ids$")
"""Lists of layer indices."""
_CONTEXT = re.compile(
    r"max_position|n_positions|n_ctx|context_length|max_seq_len|max_(target|source)_positions"
    r"|model_max_length"
)
"""Number of positions, or length at which rope switches. A run may stay below them."""
_WINDOW = re.compile(
    r"window|chunk_(size|length)|floor|local_attention$|index_topk$|block_size|extent|max_distance"
)
_NO_LENGTHS = re.compile(r"theta|seed|layer")
"""Fields with large numbers that are not lengths."""
_SMALL: tuple[tuple[str, int], ...] = (
    (r"vocab", VOCABULARY),
    (r"token_id$|_index$", 3),
    (r"(experts_per_tok(en)?|topk|moe_k|top_k_experts)$", 2),
    (r"(n|num)_(expert_)?groups?$", 2),
    (r"topk_group$", 1),
    (r"shared_experts$", 1),
    (r"expert(s|_num)$", 4),
    (r"(head_?dim|d_head|head_size|kv_channels|dim_head)$", 16),
    (r"(state|state_size)$", 16),
    (r"(key_heads|n_groups|ngroups|query_groups)$", 2),
    (r"mamba\w*heads$", 8),
    (r"heads(_per_layer)?$|n_head$", 4),
    (r"rank$", 16),
    (r"d_ssm$", 128),
    (r"intermediate|ffn|dff|dim_ff|d_inner|n_inner|feed_forward|mlp_dim", 64),
    (r"(hidden_size|d_model|n_embd|(emb|embedding)_(dim|size)|embed_proj_dim|width|embed_dim)", 64),
)
"""Largest value of an integer field, by its name. The first pattern that matches counts."""
_PATTERNS = [(re.compile(pattern), value) for pattern, value in _SMALL]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a configuration and of a run, each with its short length in the copy."""

    windows: Mapping[int, int]
    contexts: Mapping[int, int]
    """The short ones are longer than all windows, and keep their order."""

    @classmethod
    def of(cls, values: Mapping[str, Any], max_tokens: int) -> "Lengths":
        windows = sorted(set(_found(values, _may_be_window)))
        contexts = sorted({*_found(values, _is_context), max_tokens})
        rest = range(len(windows) + 1, len(windows) + len(contexts) + 1)
        return cls(
            {one: min(one, LENGTH * place) for place, one in enumerate(windows, start=1)},
            {one: LENGTH * place for one, place in zip(contexts, rest, strict=True)},
        )

    def short(self, name: str, value: Any) -> int | None:
        """Return the short length for a field, or None if the field is not a length."""
        if _is_context(name, value):
            return self.contexts[int(value)]
        return self.windows.get(int(value)) if _may_be_window(name, value) else None


def _found(values: Mapping[str, Any], belongs: Callable[[str, Any], bool]) -> Iterator[int]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _found(value, belongs)
        elif belongs(name, value):
            yield int(value)


def _is_context(name: str, value: Any) -> bool:
    return _is_length(value) and bool(_CONTEXT.search(name))


def _may_be_window(name: str, value: Any) -> bool:
    """Return whether a field is a window, a chunk or an unknown large number."""
    if not _is_length(value) or _CONTEXT.search(name) or _NO_LENGTHS.search(name):
        return False
    unknown = type(value) is int and value > LENGTH and _limit(name) is None
    return unknown or bool(_WINDOW.search(name))


def _is_length(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value > _NO_LENGTH and value == int(value)


@dataclass(frozen=True, slots=True)
class SmallCopy:
    """A small configuration, and the sample lengths that exercise all its features."""

    config: PretrainedConfig
    max_tokens: int
    """Tokens of the longest sample."""
    lengths: Sequence[int]
    """Windows, chunks and rope switches below `max_tokens`."""
    num_layers: int


def small_copy(
    config: PretrainedConfig,
    max_tokens: int,
    *,
    narrow: bool = True,
    in_order: bool = False,
    trust_remote_code: bool = False,
) -> SmallCopy:
    """Return a small copy of a configuration. Turn `narrow` off for models that fix their widths;
    turn `in_order` on for models that need their first layers. Raises what the model's own checks
    raise.

    `max_tokens`: tokens of the run's longest sample.
    """
    values = _text_values(config)
    lengths = Lengths.of(values, max_tokens)
    all_layers = _shrunk(values, lengths, narrow=narrow)
    kinds = kinds_of_layers(_config(config, all_layers), trust_remote_code)
    kept = _kept(kinds, in_order)
    small = _with_layers(all_layers, kept, len(kinds))
    longest = lengths.contexts[max_tokens]
    within = {*lengths.windows.values(), *lengths.contexts.values()}
    switches = sorted(length for length in within if length < longest)
    return SmallCopy(_config(config, small), longest, switches, len(kept))


def _text_values(config: PretrainedConfig) -> dict[str, Any]:
    return config.get_text_config().to_dict()


def _config(config: PretrainedConfig, values: dict[str, Any]) -> PretrainedConfig:
    return type(config.get_text_config()).from_dict(deepcopy(values))


def _shrunk(values: Mapping[str, Any], lengths: Lengths, *, narrow: bool) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            small[name] = _shrunk(value, lengths, narrow=narrow)
        elif (short := lengths.short(name, value)) is not None:
            small[name] = type(value)(short)
        elif isinstance(value, list) and value and all(type(one) is int for one in value):
            small[name] = [_small(name, one, narrow) for one in value]
        else:
            small[name] = _small(name, value, narrow)
    if narrow:
        _keep_relations(values, small)
    return small


def _small(name: str, value: Any, narrow: bool) -> Any:
    if type(value) is not int:
        return value
    most = _limit(name)
    if most is None or not (narrow or "vocab" in name or "token_id" in name):
        return value
    return min(value, most)


def _limit(name: str) -> int | None:
    return next((most for pattern, most in _PATTERNS if pattern.search(name)), None)


def _keep_relations(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Keep the number of heads that share keys and values, and other relations between widths."""
    heads = values.get("num_attention_heads")
    for name in ("num_key_value_heads", "num_kv_heads"):
        given = values.get(name)
        if given and heads:
            small[name] = min(small[name], 4 if given == heads else 2)
    if small.get("hidden_size") and heads and not values.get("head_dim"):
        small["num_attention_heads"] = 4
    if "expand" in values and "num_heads" in values:
        small["num_heads"] = values["expand"] * small["hidden_size"] // small["head_dim"]
    if "mamba_d_head" in values:
        small["mamba_d_head"] = 16
        small["mamba_n_heads"] = values["mamba_expand"] * small["hidden_size"] // 16
    if small.get("qk_nope_head_dim") and small.get("qk_head_dim"):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    _keep_rope(values, small)


def _keep_rope(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    was, now = _head_width(values), _head_width(small)
    if not was or not now:
        return

    def fit(given: Any) -> Any:
        if isinstance(given, dict):
            return {name: fit(value) for name, value in given.items()}
        if isinstance(given, list) and given and all(isinstance(v, int | float) for v in given):
            if all(type(one) is int for one in given) and sum(given) * 2 <= was and len(given) < 8:
                return [max(1, one * now // was) for one in given]
            number = max(1, len(given) * now // was)
            return [given[place * len(given) // number] for place in range(number)]
        return given

    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            small[name] = fit(small[name])
    if isinstance(values.get("rotary_dim"), int):
        small["rotary_dim"] = values["rotary_dim"] * now // was // 2 * 2


def _head_width(values: Mapping[str, Any]) -> int:
    width = values.get("qk_rope_head_dim") or values.get("head_dim")
    if width:
        return int(width)
    hidden = values.get("hidden_size") or values.get("n_embd") or 0
    heads = values.get("num_attention_heads") or values.get("n_head") or 0
    return int(hidden) // int(heads) if hidden and heads else 0


def kinds_of_layers(config: PretrainedConfig, trust_remote_code: bool = False) -> list[Any]:
    """Describe each layer of a model; layers with equal descriptions compute alike. Allocates no
    memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    layers = decoder_layers(model)
    if layers is None:
        return [0]
    found = [dict(_looks(layer)) for layer in layers]
    values = _text_values(config)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == len(found):
            for kind, one in zip(found, value, strict=True):
                kind["config", name] = one if isinstance(one, int | float) else repr(one)
    numbers = {name for name in set().union(*found) if _counts(name, found)}
    return [{k: v for k, v in kind.items() if k not in numbers} for kind in found]


def _counts(name: Any, layers: Sequence[Mapping[Any, Any]]) -> bool:
    """Return whether a setting is the layer's index or grows with it."""
    values = [layer[name] for layer in layers if name in layer]
    if len(values) < 3 or not all(isinstance(value, int | float) for value in values):
        return False
    return all(one < other for one, other in pairwise(values))


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return a model's layers: of the module lists nearest to its root, the longest."""
    lists = [
        (name.count("."), -len(module), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    return min(lists, key=lambda found: found[:2])[2] if lists else None


def _looks(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield classes, shapes and settings of a layer's modules."""
    for name, module in layer.named_modules():
        yield (name, ""), type(module).__name__
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str | None):
                yield (name, key), value
        for key, parameter in module.named_parameters(recurse=False):
            yield (name, key), str(tuple(parameter.shape))


def _kept(kinds: Sequence[Any], in_order: bool) -> list[int]:
    """Choose layers that cover every kind: the first ones, or one of each kind if that takes too
    many."""
    one_each = [place for place, kind in enumerate(kinds) if kind not in kinds[:place]]
    first = list(range(max(one_each[-1] + 1, min(2, len(kinds)))))
    many = len(first) > FEW_LAYERS and len(one_each) > 1
    return one_each if many and not in_order else first


def _with_layers(values: Mapping[str, Any], kept: Sequence[int], number: int) -> dict[str, Any]:
    """Return the configuration with only the `kept` layers."""
    if len(kept) == number:
        return dict(values)

    def fit(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _fit_keys(value, kept)
        if isinstance(value, list):
            return _fit_list(name, value, kept, number)
        if type(value) is not int:
            return value
        if _LAYERS.search(name) and value == number:
            return len(kept)
        if _FIRST_LAYERS.search(name):
            return sum(place < value for place in kept)
        if _LAST_LAYERS.search(name):
            return sum(place >= number - value for place in kept)
        return value

    return {name: fit(name, value) for name, value in values.items()}


def _fit_keys(value: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Keep settings whose keys are layer indices, for the kept layers only."""
    if not value or not all(str(key).isdigit() for key in value):
        return value
    of = {int(key): settings for key, settings in value.items()}
    return {str(place): of[layer] for place, layer in enumerate(kept) if layer in of}


def _fit_list(name: str, value: list[Any], kept: Sequence[int], number: int) -> list[Any]:
    if len(value) == number and not (_are_numbers(value, number) and _LAYER_NUMBERS.search(name)):
        return [value[place] for place in kept]
    if value and _LAYER_NUMBERS.search(name) and _are_numbers(value, number):
        return [place for place, layer in enumerate(kept) if layer in value]
    return value


def _are_numbers(value: Sequence[Any], number: int) -> bool:
    """Return whether the values are distinct, valid layer indices."""
    whole = all(type(one) is int and 0 <= one < number for one in value)
    return whole and len(set(value)) == len(value)
