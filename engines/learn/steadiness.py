"""Does a policy compute the same whenever it is asked? Tried on the model itself.

A router's noise, a buffer that a forward pass changes, a rope that grows with the longest position
of a row: values would then depend on chance, on what was computed before, or on the neighbours.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engines.learn.neighbours import NO_TOKENS_TOLERANCE, NUM_TOKENS
from engines.learn.packing import MicroBatch, TokenSequence, lay_out
from engines.learn.policy import PolicyModel


@torch.no_grad()
def check_steady(policy: PolicyModel, dtype: torch.dtype) -> None:
    """Raises ValueError, which names a part of the model, when the policy draws random numbers or
    keeps something of what it computed, at the first positions and at the last that its config
    has; or when a sample's values depend on the positions of another in its row.

    `dtype`: in which it computes. Collective.
    """
    state, chance = _state(policy), _chance(policy)
    short = policy.score(_short(policy), 1.0).logprobs
    batch = _behind(policy, policy.model.config)
    behind = policy.score(batch, 1.0).logprobs[-len(short) :]
    if _changed(chance, _chance(policy)):
        with _noise_named(policy):
            policy.score(batch, 1.0)
    kept = _state(policy)
    for name, value in state.items():
        if _changed(value, kept.get(name)):
            raise ValueError(
                f"{name} of {_class(policy)} changes when the model computes, and what it computes "
                "next with it: this trainer needs a model that keeps nothing"
            )
    if not policy.alone and (behind - short).abs().mean().item() > NO_TOKENS_TOLERANCE[dtype]:
        raise ValueError(
            f"{_class(policy)} computes a sample otherwise when another in its row has higher "
            "positions, as some ropes do: this trainer does not compute that"
        )


def _class(policy: PolicyModel) -> str:
    return type(policy.model).__name__


def _sequences(policy: PolicyModel) -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    ids = (rng.integers(policy.vocab_size, size=size + 1) for size in NUM_TOKENS)
    return [TokenSequence(one.astype(np.int32), 1) for one in ids]


def _short(policy: PolicyModel) -> MicroBatch:
    return lay_out([1], _sequences(policy))


def _behind(policy: PolicyModel, config: Any) -> MicroBatch:
    """The short sample behind another at the model's last positions; that one alone where each has
    a row of its own."""
    batch = lay_out([0] if policy.alone else [0, 1], _sequences(policy))
    num_first, positions = NUM_TOKENS[0], batch.position_ids.copy()
    last = getattr(config.get_text_config(), "max_position_embeddings", None) or num_first
    positions[:num_first] += max(0, last - num_first)
    return replace(batch, position_ids=positions)


def _state(policy: PolicyModel) -> dict[str, Any]:
    """Numbers and tensors of modules that are not trained, by name."""
    return {
        f"{place}.{name}": value.clone() if isinstance(value, Tensor) else value
        for place, module in policy.model.named_modules()
        for name, value in (*vars(module).items(), *module.named_buffers(recurse=False))
        if isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    }


def _chance(policy: PolicyModel) -> Tensor:
    """State of the generator that the policy's device draws from."""
    on_gpu = policy.device.type == "cuda"
    return torch.cuda.get_rng_state(policy.device) if on_gpu else torch.get_rng_state()


def _changed(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape != after.shape or not torch.equal(before, after)
    return type(before) is not type(after) or before != after


@contextmanager
def _noise_named(policy: PolicyModel) -> Generator[None]:
    """Raise ValueError that names the innermost module that draws random numbers while this
    lasts."""
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
        f"{found} of {_class(policy)} draws random numbers, so that scoring twice differs: this "
        "trainer needs a model without noise"
    )
