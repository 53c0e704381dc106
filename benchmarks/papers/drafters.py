"""Drafters in SpecActor's setting (5.1): what they cost, and how often they are right. Pure.

A drafter of P parameters on one Hopper GPU takes for every token that it drafts

    overhead + 2 P bytes / bandwidth + batch (2 P FLOP / compute + KV of the context / bandwidth)

Assumed, as the paper prints none of it: 1/6 ms of launches for each layer, so 4 ms for 0.5B and
4.7 ms for 1.5B; 4,096 tokens of context each; a look-up for an n-gram in 5 us. On several GPUs each
drafts for its share of the batch.

Assumed too: the probability p that a draft token is right is the same all through a response, and

    logit p = mean of the drafter + s_request N(request) + s_own N(request, drafter)

so that a hard request is hard for all, and which drafter is the best differs (Fig. 7). The seconds
of a model and the mean of 0.5B are those of one point: which others agree with what is printed is
looked for (`benchmarks.papers.drafter_assumptions`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from scipy.special import expit, logit

from benchmarks.papers.settings import SPECACTOR_32B_TP4, LinearLatency
from schemas.drafting import NGRAM
from schemas.rollout import RequestId

BYTES_PER_S = 3.35e12
FLOPS_PER_S = 500e12
CONTEXT_TOKENS = 4096
LAUNCHES_S = 1e-3 / 6


@dataclass(frozen=True, slots=True)
class AssumedDrafter:
    """One way of drafting."""

    step_s: float
    """Seconds to draft a token for each of a batch, whatever its size."""
    sequence_s: float
    """More, for each of the batch."""
    mean_acceptance: float
    """p of a request in the middle."""
    own_spread: float
    """s_own."""

    @classmethod
    def of_model(
        cls, params: float, layers: int, kv_heads: int, head_dim: int, **acceptance: float
    ) -> "AssumedDrafter":
        weights_s = 2 * params / BYTES_PER_S
        kv_s = CONTEXT_TOKENS * layers * 2 * kv_heads * head_dim * 2 / BYTES_PER_S
        return cls(
            step_s=layers * LAUNCHES_S + weights_s,
            sequence_s=2 * params / FLOPS_PER_S + kv_s,
            **acceptance,
        )


SMALL, LARGE = "Qwen2.5-0.5B", "Qwen2.5-1.5B"
DRAFTERS: Mapping[str, AssumedDrafter] = {
    SMALL: AssumedDrafter.of_model(0.49e9, 24, 2, 64, mean_acceptance=0.78, own_spread=0.5),
    LARGE: AssumedDrafter.of_model(1.54e9, 28, 2, 128, mean_acceptance=0.82, own_spread=0.5),
    NGRAM: AssumedDrafter(step_s=0.0, sequence_s=5e-6, mean_acceptance=0.17, own_spread=1.5),
}
"""Drafters by name (5.1)."""
REQUEST_SPREAD = 0.5
"""s_request."""


@dataclass(frozen=True)
class SpeculativeLatency(LinearLatency):
    """SpecActor's verifier with its drafters.

    V_w(b) = step + sequence b (w + 1) + token (context tokens), as `LinearLatency` verifies: the
    affine form of 4.1, from weights, FLOPs and KV cache.
    """

    drafter_gpus: int = 1
    """GPUs that share the drafting of an engine."""
    draft_scale: float = 1.0
    """Seconds of drafting over those assumed above."""

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        one = DRAFTERS[drafter]
        share = math.ceil(batch / self.drafter_gpus)
        return self.draft_scale * window * (one.step_s + one.sequence_s * share)


LATENCY = SpeculativeLatency(**asdict(SPECACTOR_32B_TP4) | {"verifies": True})


FUSED_SHARE = 0.25
"""Share of the tokens that models guess wrong which a history beside them is assumed to guess
right. In the shipped demo both together have a quarter of the tokens accepted that the model alone
has not: 75 % in place of 66 (`refrain bench decoupled --split-cores`)."""


def fuse_history(
    acceptances: Mapping[RequestId, Mapping[str, float]], share: float = FUSED_SHARE
) -> dict[RequestId, dict[str, float]]:
    """The same where history drafts beside each model, and guesses right this share of the tokens
    that the model guesses wrong. To look it up takes no time."""
    return {
        id: {
            name: p if name == NGRAM else round(p + share * (1.0 - p), 3) for name, p in own.items()
        }
        for id, own in acceptances.items()
    }


def draw_acceptances(
    ids: Iterable[RequestId], seed: int, acceptance: float = DRAFTERS[SMALL].mean_acceptance
) -> dict[RequestId, dict[str, float]]:
    """p of each request with each drafter. `acceptance`: that of 0.5B for a request in the middle;
    another than assumed moves all of them by as much on the scale of logits. Three digits, so that
    what follows from one is computed once."""
    ids = list(ids)
    shift = logit(acceptance) - logit(DRAFTERS[SMALL].mean_acceptance)
    rng = np.random.default_rng([seed, 4])
    request = REQUEST_SPREAD * rng.standard_normal(len(ids))
    columns = {
        name: expit(
            logit(one.mean_acceptance)
            + shift
            + request
            + one.own_spread * rng.standard_normal(len(ids))
        )
        .round(3)
        .tolist()
        for name, one in DRAFTERS.items()
    }
    rows = zip(*columns.values(), strict=True)
    return {id: dict(zip(columns, row, strict=True)) for id, row in zip(ids, rows, strict=True)}
