"""The backward pass computes again only the layers that the memory plan has no room for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from refrain.engines.learn.determinism import probe_sequences
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.packing import lay_out
from refrain.engines.learn.recomputation import num_kept_layers
from refrain.schemas.config import TrainConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_last_layers_are_not_computed_again(model_dir: Path) -> None:
    gradients = {}
    for kept, expected in ((0, [2, 2]), (1, [2, 1]), (2, [1, 1])):
        loading = Loading(CPU, gradient_checkpointing=True, kept_layers=kept)
        policy = load_policy(model_dir, loading)
        calls = [0] * len(policy.layers)

        def count(layer: torch.nn.Module, *_: object) -> None:
            calls[policy.layers.index(layer)] += 1  # noqa: B023

        for layer in policy.layers:
            layer.register_forward_pre_hook(count)
        batch = lay_out([0, 1], probe_sequences(policy))
        policy.score(batch, 1.0).logprobs.sum().backward()
        assert calls == expected
        gradients[kept] = [one.grad for one in policy.parameters()]
    assert all(map(torch.equal, gradients[0], gradients[1]))
    assert all(map(torch.equal, gradients[0], gradients[2]))


def test_auto_keeps_what_the_gpu_has_room_for(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    for gb, kept in ((80, 2), (1, 0)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, gb=gb: (0, gb * 2**30))
        assert num_kept_layers(config, CUDA) == kept
        assert num_kept_layers(make_config(gradient_checkpointing=True), CUDA) == 0
        assert num_kept_layers(config, CPU) == 0
