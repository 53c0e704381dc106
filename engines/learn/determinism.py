"""Check, on the model itself, that a policy computes the same values every time.

Examples of faults: router noise, a buffer that a forward pass changes, a rope that grows with the
longest position of a row. Values would then depend on chance, on earlier passes or on neighbours in
the row.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from refrain.engines.learn.packing import MicroBatch, TokenSequence, lay_out
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.sample_isolation import NO_TOKENS_TOLERANCE, NUM_TOKENS


@torch.no_grad()
def check_steady(policy: PolicyModel, dtype: torch.dtype) -> None:
    """Raise ValueError, naming a part of the model, when the policy draws random numbers or keeps
    state from a pass. This is tried at the first and at the last positions that the config allows.
    Raise it too when a sample's values depend on the positions of another sample in its row.

    `dtype`: data type in which the policy computes. Collective.
    """
    state, chance = _state(policy), _chance(policy)
    short = policy.score(lay_out([1], probe_sequences(policy)), 1.0).logprobs
    batch = _behind(policy)
    behind = policy.score(batch, 1.0).logprobs[-len(short) :]
    if _changed(chance, _chance(policy)):
        with _noise_named(policy):
            policy.score(batch, 1.0)
    kept = _state(policy)
    for name, value in state.items():
        if _changed(value, kept.get(name)):
            raise ValueError(
                f"{name} of {_class(policy)} changes when the model computes, and may change the "
                "next result: this trainer needs a model that keeps no state"
            )
    if not policy.alone and (behind - short).abs().mean().item() > NO_TOKENS_TOLERANCE[dtype]:
        raise ValueError(
            f"{_class(policy)} computes a sample otherwise when another in its row has higher "
            "positions, as some ropes do: this trainer does not support that"
        )


def _class(policy: PolicyModel) -> str:
    return type(policy.model).__name__


def probe_sequences(policy: PolicyModel) -> list[TokenSequence]:
    """Return two sequences of random tokens, the longer one first."""
    rng = np.random.default_rng(0)
    ids = (rng.integers(policy.vocab_size, size=size + 1) for size in NUM_TOKENS)
    return [TokenSequence(one.astype(np.int32), 1) for one in ids]


def _behind(policy: PolicyModel) -> MicroBatch:
    """Return the short sample behind another one at the model's last positions. If each sample
    needs its own row, return that other one alone."""
    batch = lay_out([0] if policy.alone else [0, 1], probe_sequences(policy))
    num_first, positions = NUM_TOKENS[0], batch.position_ids.copy()
    config = policy.model.config.get_text_config()
    last = getattr(config, "max_position_embeddings", None) or num_first
    positions[:num_first] += max(0, last - num_first)
    return replace(batch, position_ids=positions)


def _state(policy: PolicyModel) -> dict[str, Any]:
    """Return modules' numbers and tensors that are not trained, by name."""
    return {
        f"{place}.{name}": value.clone() if isinstance(value, Tensor) else value
        for place, module in policy.model.named_modules()
        for name, value in (*vars(module).items(), *module.named_buffers(recurse=False))
        if isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    }


def _chance(policy: PolicyModel) -> Tensor:
    """Return the state of the random generator on the policy's device."""
    on_gpu = policy.device.type == "cuda"
    return torch.cuda.get_rng_state(policy.device) if on_gpu else torch.get_rng_state()


def _changed(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape != after.shape or not torch.equal(before, after)
    return type(before) is not type(after) or before != after


@contextmanager
def _noise_named(policy: PolicyModel) -> Generator[None]:
    """Raise ValueError that names the innermost module which draws random numbers in this
    context."""
    begun: dict[nn.Module, Tensor] = {}
    noisy: list[str] = []
    hooks = []
    for name, module in policy.named_modules():

        def begin(module: nn.Module, _: Any) -> None:
            begun[module] = _chance(policy)

        def end(module: nn.Module, *_: Any, name: str = name) -> None:
            if _changed(begun[module], _chance(policy)):
                noisy.append(name)

        hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    found = noisy[0] if noisy else "a part"
    raise ValueError(
        f"{found} of {_class(policy)} draws random numbers, so scoring twice gives two results: "
        "this trainer needs a model without noise"
    )
