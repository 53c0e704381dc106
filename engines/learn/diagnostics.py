"""Metrics of a step's loss and tokens, summed over passes and processes.

Each function returns one value per name for the tokens of a micro-batch. `combine` turns these into
metrics of a minibatch, and `summarise` into metrics of a training step.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refrain.engines.learn.objectives.ratios import bounded_ratios
from refrain.engines.learn.objectives.tokens import PolicyLosses

Sums = dict[str, Float[Tensor, ""]]

PEAKS = ("actor/ratio_max", "mismatch/ratio_max")
LOWS = ("mismatch/ratio_min",)
WEIGHTED = ("actor/pg_loss", "actor/kl_loss")
"""Metrics whose tokens already carry the loss's weights. All others are sums over counted tokens,
except peaks and lows."""
DIFF = "actor/rollout_logprob_diff"
_SQUARES = "mismatch/ratio_squares"
BY_STALENESS = "staleness/"
"""Prefix of the metrics of tokens of one staleness, such as `staleness/1/k1`."""


def clip_figures(
    found: PolicyLosses,
    advantages: Float[Tensor, "tokens"],
    counted: Bool[Tensor, "tokens"],
    dual_clip: float | None,
) -> Sums:
    """Return ratios to the old policy, and how many tokens a bound of the objective acts on.

    `actor/pg_clipfrac` is `actor/clipfrac_low` (negative advantage) plus `actor/clipfrac_high`.
    `actor/pg_clipfrac_lower` is the share of the dual clip, if there is one, as in veRL.
    `actor/ppo_kl` is the k1 estimate of KL(pi_old || pi), `log pi_old - log pi`, which can be
    negative.
    """
    ratio = bounded_ratios(found.log_ratios)
    figures = {
        "actor/pg_clipfrac": (found.low | found.high).sum().float(),
        "actor/clipfrac_low": found.low.sum().float(),
        "actor/clipfrac_high": found.high.sum().float(),
        "actor/ppo_kl": -(found.log_ratios * counted).sum(),
        "actor/ratio_mean": (ratio * counted).sum(),
        "actor/ratio_max": (ratio * counted).max(),
    }
    if dual_clip is not None:
        far = (ratio > dual_clip) & (advantages < 0.0) & counted
        figures["actor/pg_clipfrac_lower"] = far.sum().float()
    return figures


def mismatch_figures(log_ratios: Float[Tensor, "tokens"], counted: Bool[Tensor, "tokens"]) -> Sums:
    """Return how the trainer's old policy differs from the engine's policy, which generated the
    tokens. `log_ratios` are log pi_old - log pi_inference, 0 where tokens do not count.

    `mismatch/k1` and `k3` estimate KL(pi_inference || pi_old) in nats per token. `mismatch/ratio_*`
    are token ratios, without cap or rejection.
    """
    ratio = bounded_ratios(log_ratios)
    return {
        DIFF: log_ratios.abs().sum(),
        "mismatch/k1": -log_ratios.sum(),
        "mismatch/k3": (ratio - 1.0 - log_ratios).sum(),
        "mismatch/ratio_mean": (ratio * counted).sum(),
        _SQUARES: (ratio.square() * counted).sum(),
        "mismatch/ratio_max": (ratio * counted).max(),
        "mismatch/ratio_min": torch.where(counted, ratio, torch.inf).min(),
    }


def staleness_figures(
    staleness: Int[Tensor, "tokens"],
    log_ratios: Float[Tensor, "tokens"],
    clipped: Bool[Tensor, "tokens"],
    max_staleness: int,
) -> Sums:
    """Return tokens, `mismatch/k1` and clipped tokens for each staleness up to `max_staleness`.

    `staleness`: in policy versions, -1 where tokens do not count. `log_ratios`: as in
    `mismatch_figures`.
    """
    figures: Sums = {}
    for versions in range(max_staleness + 1):
        own = staleness == versions
        figures[f"{BY_STALENESS}{versions}/tokens"] = own.sum().float()
        figures[f"{BY_STALENESS}{versions}/k1"] = -(log_ratios * own).sum()
        figures[f"{BY_STALENESS}{versions}/clipfrac"] = (clipped & own).sum().float()
    return figures


def nothing_like(figures: Sums) -> Sums:
    """Return the values that these metrics have for no tokens."""
    return {
        name: torch.full_like(value, torch.inf if name in LOWS else 0.0)
        for name, value in figures.items()
    }


def combine(
    measured: Sequence[Sums], num_counted: int, world_size: int, num_sharing: int = 1
) -> dict[str, float]:
    """Return the metrics of a minibatch from the sums of all passes on all ranks. `num_sharing`:
    ranks that share each row, which have the same sums."""
    names = list(measured[0])
    passes = torch.stack([torch.stack([sums[name] for name in names]) for sums in measured])
    totals, peaks, lows = passes.sum(0), passes.amax(0), passes.amin(0)
    if world_size > 1:
        dist.all_reduce(totals)
        totals /= num_sharing
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        dist.all_reduce(lows, dist.ReduceOp.MIN)
    metrics = {
        name: total / num_counted for name, total in zip(names, totals.tolist(), strict=True)
    }
    for name in WEIGHTED:
        if name in metrics:
            metrics[name] *= num_counted
    for chosen, values in ((PEAKS, peaks), (LOWS, lows)):
        metrics |= {name: values[names.index(name)].item() for name in chosen}
    return metrics


def summarise(updates: Sequence[dict[str, float]], num_measured: int) -> dict[str, float]:
    """Return the metrics of a training step from those of its updates. They are means, unless the
    name says otherwise. Metrics that compare engine and trainer use only the first `num_measured`
    updates, for which the old policy was known."""
    if not updates:
        return {}
    measured = updates[:num_measured]
    metrics = {}
    for name in updates[0]:
        if name.startswith(BY_STALENESS):
            continue
        own = measured if name == DIFF or name.startswith("mismatch/") else updates
        values = [update[name] for update in own]
        how = np.max if name in PEAKS else np.min if name in LOWS else np.mean
        metrics[name] = float(how(values))
    squares = metrics.pop(_SQUARES)
    metrics["mismatch/effective_share"] = metrics["mismatch/ratio_mean"] ** 2 / squares
    metrics["actor/lr"] = updates[-1]["actor/lr"]
    return metrics | _by_staleness(updates, measured)


def _by_staleness(
    updates: Sequence[dict[str, float]], measured: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Return the share of tokens of each staleness that occurs, and means over its tokens."""
    metrics = {}
    for name in (name for name in updates[0] if name.startswith(BY_STALENESS)):
        tokens = f"{name.rpartition('/')[0]}/tokens"
        if name == tokens:
            num, total = sum(update[name] for update in updates), len(updates)
        else:
            own = measured if name.endswith("/k1") else updates
            num, total = (sum(update[key] for update in own) for key in (name, tokens))
        if total and any(update[tokens] for update in updates):
            metrics[name] = num / total
    return metrics
