"""Validation metrics from the samples of each prompt. Pure functions of reward rows."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa

from refrain.schemas.evaluation import SourceFigures

Sample = tuple[float, dict[str, Any]]
"""Reward and extra values of one response."""


def sample_figures(rewards: pa.Table, data_sources: Mapping[str, str]) -> tuple[SourceFigures, ...]:
    """Return `mean@n` and `best@n` of each data source, and `maj@n` if scorers return `pred`.

    n is the number of samples per prompt. Each metric is a mean over the prompts of one data
    source; `data_sources` maps prompt keys to data sources. With two prompts or more,
    `std_error@n` is the standard error of `mean@n`. If all rewards are 0 or 1, `pass@k`
    estimates `best@k` for k = 2, 4, ... below n. Deviation from veRL's
    `process_validation_metrics`, which resamples: `best@n` and `maj@n` use all n samples once.
    """
    groups: dict[str, list[Sample]] = defaultdict(list)
    for row in rewards.select(["prompt_key", "reward", "extra"]).to_pylist():
        groups[row["prompt_key"]].append((row["reward"], json.loads(row["extra"])))
    by_source: dict[str, list[list[Sample]]] = defaultdict(list)
    for prompt_key, group in groups.items():
        by_source[data_sources[prompt_key]].append(group)
    return tuple(
        SourceFigures(data_source=source, num_prompts=len(own), figures=_figures_of(own))
        for source, own in sorted(by_source.items())
    )


def majority_of(group: Sequence[Sample]) -> float:
    """Return the reward of the first sample with the most frequent answer (`pred`).

    In a tie the answer that came first wins. A missing answer (None) is an answer like any other,
    as in veRL's `calc_maj_val`, so None can be the majority.
    """
    rewards: dict[str, float] = {}
    votes: Counter[str] = Counter()
    for reward, extra in group:
        answer = json.dumps(extra["pred"], sort_keys=True)
        rewards.setdefault(answer, reward)
        votes[answer] += 1
    return rewards[votes.most_common(1)[0][0]]


def _figures_of(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    n = len(groups[0])
    assert all(len(group) == n for group in groups), "every prompt has n samples"
    figures = {
        f"mean@{n}": fmean(reward for group in groups for reward, _ in group),
        f"best@{n}": fmean(max(reward for reward, _ in group) for group in groups),
    }
    if len(groups) > 1:
        figures[f"std_error@{n}"] = standard_error(groups)
    if all(reward in (0.0, 1.0) for group in groups for reward, _ in group):
        for k in _powers_below(n):
            figures[f"pass@{k}"] = fmean(pass_at(k, group) for group in groups)
    if all("pred" in extra for group in groups for _, extra in group):
        figures[f"maj@{n}"] = fmean(map(majority_of, groups))
    return figures


def standard_error(groups: Sequence[Sequence[Sample]]) -> float:
    """Return the standard error of the mean over prompts. It uses one mean per prompt, because
    samples of one prompt are not independent, but prompts are."""
    means = [fmean(reward for reward, _ in group) for group in groups]
    return stdev(means) / math.sqrt(len(means))


def pass_at(k: int, group: Sequence[Sample]) -> float:
    """Estimate the probability that at least one of k samples is right. With c of n samples right
    this is `1 - C(n - c, k) / C(n, k)`, without bias (Codex, arXiv:2107.03374, equation 1)."""
    num_wrong = sum(reward == 0.0 for reward, _ in group)
    return 1.0 - math.comb(num_wrong, k) / math.comb(len(group), k)


def _powers_below(n: int) -> list[int]:
    return [2**exponent for exponent in range(1, max(1, n).bit_length()) if 2**exponent < n]
