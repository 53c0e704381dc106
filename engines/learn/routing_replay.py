"""Train a mixture of experts with the experts that the engine chose in the rollout (R3).

    router   probabilities of all experts ─► top-k ─► weights of the chosen experts ─► experts
    replay                                    └─ the engine's choice, in place of the trainer's

Engine and trainer round otherwise, so their routers choose other experts for tokens with a
near-tie. Such a token's log-probability then differs by far more than rounding. Replay replaces the
choice alone: weights are the trainer's own probabilities of the chosen experts, with their
gradient.

Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers".
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from refrain.engines.learn.packing import MicroBatch, TokenSequence
from refrain.engines.learn.small_copy import small_copy
from refrain.engines.user_files import first_line
from refrain.schemas.rollout import MAX_EXPERTS

_SETTING = "trainer.routing_replay"
_ROUTER = re.compile(r"Top[kK]Router$")
"""Names of the modules of transformers that choose `top_k` experts with `torch.topk`."""
_NUM_TOKENS = 8
"""Tokens on which the check tries a small copy."""


class RoutingReplay:
    """The routers of a model, and the experts that they are to choose in the next passes."""

    def __init__(self, model: nn.Module) -> None:
        """Take over the choice of the model's routers. Raise ValueError if it has none."""
        routers = [one for one in model.modules() if _ROUTER.search(type(one).__name__)]
        if not routers:
            raise ValueError(
                f"{_SETTING}: this model has no routers whose choice could be replayed. It is not "
                "a mixture of experts, or chooses in its own way. Leave the setting out"
            )
        self._choices = [_Choice(one.top_k, len(one.weight)) for one in map(_as_any, routers)]
        for router, choice in zip(routers, self._choices, strict=True):
            router.register_forward_pre_hook(choice.begin)
            router.register_forward_hook(choice.end, always_call=True)

    @property
    def most_experts(self) -> int:
        """Experts of the layer with the most."""
        return max(choice.num_experts for choice in self._choices)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers with experts, and experts of a token in each."""
        return len(self._choices), self._choices[0].top_k

    def use(self, experts: UInt8[Tensor, "row layers top_k"] | None) -> None:
        """Choose these experts in the passes from now on, and when the backward pass repeats them.
        0: the trainer's own choice; otherwise the number of the expert plus one. None: choose
        freely."""
        for layer, choice in enumerate(self._choices):
            choice.given = None if experts is None else experts[:, layer].long()

    def use_of(self, batch: MicroBatch, device: torch.device) -> None:
        """Choose the experts of the samples of a row. Without any, choose freely."""
        if not any(batch.experts):
            self.use(None)
            return
        each = zip(batch.experts, batch.num_tokens, strict=True)
        row = np.concatenate([experts_of(data, self.shape, num) for data, num in each])
        self.use(torch.from_numpy(row).to(device))

    def take_counts(self) -> tuple[int, int]:
        """Return how many choices were given since the last call, and in how many of them the
        trainer's routers would have left out an expert of the engine's."""
        counts = [choice.take_counts() for choice in self._choices]
        return sum(given for given, _ in counts), sum(changed for _, changed in counts)


def _as_any(module: nn.Module) -> Any:
    return module


class _Choice(TorchFunctionMode):
    """While a router runs, `torch.topk` over its experts returns the given ones."""

    def __init__(self, top_k: int, num_experts: int) -> None:
        super().__init__()
        self.top_k, self.num_experts = top_k, num_experts
        self.given: Int[Tensor, "row top_k"] | None = None
        self._counts: Int[Tensor, 2] | None = None

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.num_experts, self.top_k

    def begin(self, *_: Any) -> None:
        self.__enter__()

    def end(self, *_: Any) -> None:
        self.__exit__(None, None, None)

    def take_counts(self) -> tuple[int, int]:
        counts, self._counts = self._counts, None
        if counts is None:
            return 0, 0
        given, changed = counts.tolist()
        return given, changed

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        found = func(*args, **kwargs or {})
        if self.given is None or func not in (torch.topk, Tensor.topk):
            return found
        scores = args[0]
        if scores.dim() != 2 or (scores.shape[-1], found.indices.shape[-1]) != self._sizes:
            return found  # Some routers first choose groups of experts.
        assert found.indices.shape == self.given.shape, "the row has other tokens than its experts"
        known = (self.given > 0).all(-1, keepdim=True)
        chosen = torch.where(known, self.given - 1, found.indices)
        with torch.no_grad():
            kept = (chosen[:, :, None] == found.indices[:, None]).any(-1).all(-1)
            counts = torch.stack([known.sum(), (known[:, 0] & ~kept).sum()])
            self._counts = counts if self._counts is None else self._counts + counts
        return type(found)((scores.gather(-1, chosen), chosen))


def experts_of(
    data: bytes, shape: tuple[int, int], num_tokens: int
) -> UInt8[NDArray[np.uint8], "tokens layers top_k"]:
    """Return the experts of the first `num_tokens` tokens of a rollout (`Generated.experts`);
    unknown ones are 0. `shape`: see `RoutingReplay`. Raise ValueError if an engine recorded another
    shape."""
    layers, top_k = shape
    if len(data) % (layers * top_k):
        raise ValueError(
            f"a rollout has {len(data)} bytes of experts, which are not whole tokens of {layers} "
            f"layers with {top_k} experts each: the engine's model is not the trainer's"
        )
    own = np.frombuffer(data, np.uint8).reshape(-1, layers, top_k)[:num_tokens]
    experts = np.zeros((num_tokens, layers, top_k), np.uint8)
    experts[: len(own)] = own
    return experts


def replay_metrics(
    replay: RoutingReplay | None, sequences: Sequence[TokenSequence], device: torch.device
) -> dict[str, float]:
    """Return the metrics of a training step on these sequences; none without replay.

    `routing/replayed_share`: input tokens whose experts are known in all layers.
    `routing/changed_share`: choices of known experts in which the trainer's routers would have
    left out one. Collective: sums over the passes of all ranks since the last call.
    """
    if replay is None:
        return {}
    counts = torch.tensor(replay.take_counts(), dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(counts)
    given, changed = counts.tolist()
    return {
        "routing/replayed_share": replayed_share(sequences, replay.shape),
        "routing/changed_share": changed / max(1, given),
    }


def replayed_share(sequences: Sequence[TokenSequence], shape: tuple[int, int]) -> float:
    """Return the share of the input tokens whose experts are known in all layers."""
    known = [
        (experts_of(one.experts, shape, one.num_input_tokens) > 0).all((1, 2)) for one in sequences
    ]
    return float(np.concatenate(known).mean())


@torch.no_grad()
@torch.random.fork_rng(devices=[])
def check_replay(config: PretrainedConfig, *, trust_remote_code: bool = False) -> tuple[int, int]:
    """Replay a choice on a small copy of the model. Return the model's own `RoutingReplay.shape`.

    Raise ValueError if the model has no experts or too many, if the choice does not act in the
    copy, or if no copy can be made.
    """
    text = config.get_text_config()
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    of_whole = RoutingReplay(whole)
    if (most := of_whole.most_experts) > MAX_EXPERTS:
        raise ValueError(
            f"{_SETTING}: {text.model_type} has {most} experts a layer, and rollouts record "
            f"at most {MAX_EXPERTS}. Leave the setting out"
        )
    try:
        small = small_copy(config, _NUM_TOKENS, trust_remote_code=trust_remote_code).config
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, trust_remote_code=trust_remote_code
        ).eval()
    except Exception as error:  # Each model checks its sizes in its own way.
        raise ValueError(f"{_SETTING} was not tried: {first_line(error)}") from error
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    replay = RoutingReplay(model)
    layers, top_k = replay.shape
    ids = torch.arange(_NUM_TOKENS)[None] % small.get_text_config().vocab_size
    free = model(input_ids=ids, use_cache=False).logits
    results = []
    for first in (1, 2):
        experts = torch.arange(first, first + top_k, dtype=torch.uint8)
        replay.use(experts.expand(_NUM_TOKENS, layers, top_k))
        results.append(model(input_ids=ids, use_cache=False).logits)
    num_given, _ = replay.take_counts()
    acts = not any(torch.allclose(one, free) for one in results)
    if num_given != 2 * _NUM_TOKENS * layers or not acts or torch.allclose(*results):
        raise ValueError(
            f"{_SETTING}: the routers of {text.model_type} do not follow a given choice, or route "
            "by groups in their own way. Leave the setting out"
        )
    return of_whole.shape
