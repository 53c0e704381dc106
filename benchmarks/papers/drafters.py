"""Drafters in SpecActor's setting (5.1): their costs, and how often they are right.

A drafter of P parameters on one Hopper GPU takes for every token that it drafts

    overhead + 2 P bytes / bandwidth + batch (2 P FLOP / compute + KV of the context / bandwidth)

The paper prints none of it. Assumed: 1/6 ms of launches for each layer, so 4 ms for 0.5B and 4.7 ms
for 1.5B; 4,096 tokens of context each; 5 us to look up an n-gram. A draft head is refrain's
(`engines.draft_head.model`): its MLP, and 32,000 rows of the policy's output layer, on the policy's
own 4 GPUs. Its launches take as long as those of a layer.

Assumed too: the probability p that a draft token is right is constant in a response, and

    logit p = mean of the drafter + s_request N(request) + s_own N(request, drafter)

So a hard request is hard for all drafters, and the best drafter differs (Fig. 7). With these values
coupled drafting and the last rollouts' acceptance are near what the paper prints. The head's p is
what gives 2.5 tokens a step with 3 drafts, which published EAGLE-3 heads keep up in RL. Those have
attention, and refrain's have none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from scipy.special import expit, logit

from refrain.benchmarks.papers.settings import SPECACTOR_32B_TP4, LinearLatency
from refrain.schemas.drafting import HEAD, NGRAM
from refrain.schemas.rollout import RequestId

BYTES_PER_S = 3.35e12
FLOPS_PER_S = 500e12
CONTEXT_TOKENS = 4096
LAUNCHES_S = 1e-3 / 6


@dataclass(frozen=True, slots=True)
class AssumedDrafter:
    """A drafter's costs and acceptance."""

    weights_s: float
    """Seconds to read the weights, for each token of a batch of any size."""
    launches_s: float
    """Seconds of launches for the same."""
    sequence_s: float
    """Further seconds for each request of the batch."""
    mean_acceptance: float
    """p of the median request."""
    own_spread: float
    """s_own."""

    @classmethod
    def of_model(
        cls,
        params: float,
        layers: int,
        kv_heads: int,
        head_dim: int,
        num_gpus: int = 1,
        **acceptance: float,
    ) -> "AssumedDrafter":
        bytes_per_s, flops_per_s = num_gpus * BYTES_PER_S, num_gpus * FLOPS_PER_S
        weights_s = 2 * params / bytes_per_s
        kv_s = CONTEXT_TOKENS * layers * 2 * kv_heads * head_dim * 2 / bytes_per_s
        return cls(
            weights_s=weights_s,
            launches_s=layers * LAUNCHES_S,
            sequence_s=2 * params / flops_per_s + kv_s,
            **acceptance,
        )


SMALL, LARGE = "Qwen2.5-0.5B", "Qwen2.5-1.5B"
DRAFTERS: Mapping[str, AssumedDrafter] = {
    SMALL: AssumedDrafter.of_model(0.49e9, 24, 2, 64, mean_acceptance=0.78, own_spread=0.5),
    LARGE: AssumedDrafter.of_model(1.54e9, 28, 2, 128, mean_acceptance=0.82, own_spread=0.5),
    NGRAM: AssumedDrafter(0.0, 0.0, sequence_s=5e-6, mean_acceptance=0.17, own_spread=1.5),
    HEAD: AssumedDrafter.of_model(
        # 7 x 5,120^2 parameters of the head, and 5,120 x 32,000 of the output layer.
        0.35e9,
        1,
        kv_heads=0,
        head_dim=0,
        num_gpus=4,
        mean_acceptance=0.69,
        own_spread=0.5,
    ),
}
"""Drafters by name (5.1), and refrain's draft head."""
OF_PAPER = (SMALL, LARGE, NGRAM)
"""The paper's drafters."""
REQUEST_SPREAD = 0.5
"""s_request."""


@dataclass(frozen=True)
class SpeculativeLatency(LinearLatency):
    """SpecActor's verifier with its drafters.

    V_w(b) = step + sequence b (w + 1) + token (context tokens), as `LinearLatency` verifies: the
    affine form of 4.1, from weights, FLOPs and KV cache.
    """

    engines_per_drafter: int = 1
    """Engines that share a GPU of a drafter, with equal batches."""
    launches: float = 1.0
    """Seconds of launches, over those assumed."""

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        one = DRAFTERS[drafter]
        fixed_s = one.weights_s + self.launches * one.launches_s
        num_engines = 1 if drafter == HEAD else self.engines_per_drafter
        return window * (fixed_s + one.sequence_s * batch * num_engines)


LATENCY = SpeculativeLatency(**asdict(SPECACTOR_32B_TP4) | {"verifies": True})


def draw_acceptances(
    ids: Iterable[RequestId], seed: int, spread: float = 1.0, head: float | None = None
) -> dict[RequestId, dict[str, float]]:
    """Draw p of each request with each drafter, to three digits so that equal ones are cached.
    `spread`: s_request and s_own, over those assumed. `head`: p of a draft head, if not the one
    assumed."""
    ids = list(ids)
    rng = np.random.default_rng([seed, 4])
    request = spread * REQUEST_SPREAD * rng.standard_normal(len(ids))
    columns = {
        name: expit(
            logit(head if head and name == HEAD else one.mean_acceptance)
            + request
            + spread * one.own_spread * rng.standard_normal(len(ids))
        )
        .round(3)
        .tolist()
        for name, one in DRAFTERS.items()
    }
    rows = zip(*columns.values(), strict=True)
    return {id: dict(zip(columns, row, strict=True)) for id, row in zip(ids, rows, strict=True)}
