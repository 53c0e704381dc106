"""Ranking groups put on engines, in turn from both ends (RhymeRL, section 6.2). Pure.

odd steps     engine 0 ─ shortest group ─┬─ .. ─┬─ longest group ─ engine N - 1
even steps    the mirror image: engine i gets what engine N - 1 - i gets on odd steps
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Protocol

import numpy as np

from engines.balance import longest_first
from engines.histopipe.allocation import allocate_engines
from engines.histopipe.estimate import estimate_rollout_s, expected_lengths
from engines.histopipe.passes import TOKENS, ExpectedPasses
from engines.histopipe.ranking import (
    default_num_groups,
    divide_evenly,
    expected_tokens,
    length_growth,
    rank_prompts,
)
from engines.latency.interface import Latency
from schemas.config import HistoPipeConfig, TrainConfig
from schemas.rollout import LengthHistory
from schemas.step import PromptGroup, RankingGroup


class RolloutTime(Protocol):
    """Seconds of a rollout: `estimate.estimate_rollout_s` with everything else bound."""

    def __call__(
        self, lengths: np.ndarray, num_engines: int, *, tokens_per_pass: np.ndarray
    ) -> float:
        """`lengths`: response tokens, [prompts, samples], as is what a pass gains each."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one step: what a `StepPlan` has under the same names."""

    groups: tuple[PromptGroup, ...]
    """Prompts in order of submission."""
    ranking_groups: tuple[RankingGroup, ...] = ()
    """Ranking groups from the shortest responses to the longest, in passes."""

    def on(self, engines: Sequence[int]) -> "Placement":
        """The same placement, on the first of these in place of engine 0, and so on."""
        groups = [g.model_copy(update={"engine": engines[g.engine]}) for g in self.groups]
        ranking_groups = [
            ranking.model_copy(
                update={"engines": tuple(sorted(engines[e] for e in ranking.engines))}
            )
            for ranking in self.ranking_groups
        ]
        return Placement(tuple(groups), tuple(ranking_groups))


def deal_groups(
    prompt_keys: Sequence[str],
    median_lengths: Mapping[str, float],
    num_engines: int,
    expected: ExpectedPasses = TOKENS,
) -> tuple[PromptGroup, ...]:
    """The group with the most expected passes first, each to the engine with the least expected
    work so far.

    This is longest-processing-time-first scheduling (Graham, 1969, at most 4/3 of the optimum).
    `median_lengths` holds the median response tokens of prompts that were answered before; a prompt
    without one is taken to be of mean length. Groups stay whole, so that the samples of a prompt
    share its prefix. Ties keep the order given.
    """
    assert num_engines > 0
    known = [median_lengths[key] for key in prompt_keys if key in median_lengths]
    typical = fmean(known) if known else 1.0
    passes = expected.of({key: median_lengths.get(key, typical) for key in prompt_keys})
    shares = longest_first(prompt_keys, passes.__getitem__, num_engines)
    engine_of = {key: engine for engine, share in enumerate(shares) for key in share}
    return tuple(
        PromptGroup(
            prompt_key=key,
            engine=engine_of[key],
            expected_tokens=median_lengths.get(key),
            expected_passes=passes[key] if key in median_lengths else None,
        )
        for key in sorted(prompt_keys, key=passes.__getitem__, reverse=True)
    )


def plan_placement(
    config: HistoPipeConfig,
    prompt_keys: Sequence[str],
    history: Mapping[str, LengthHistory],
    step: int,
    num_engines: int,
    group_size: int,
    rollout_time: RolloutTime | None = None,
    expected: ExpectedPasses = TOKENS,
) -> Placement:
    """Rank, allocate and place. Without `rollout_time` engines are divided as equally as prompts
    are. In a first epoch nothing can be ranked: use `deal_groups`."""
    assert any(key in history for key in prompt_keys), "nothing to rank by"
    num_groups = config.num_ranking_groups or default_num_groups(num_engines)
    ranked = rank_prompts(prompt_keys, history, min(num_groups, num_engines), expected)
    if rollout_time is None:
        sizes = divide_evenly(num_engines, len(ranked))
        return place_groups(ranked, sizes, history, step, expected)
    lengths = [expected_lengths(keys, history, group_size) for keys in ranked]
    rates = [of / expected.table(keys, of) for keys, of in zip(ranked, lengths, strict=True)]

    def times(group: int, engines: int) -> float:
        return rollout_time(lengths[group], engines, tokens_per_pass=rates[group])

    sizes = allocate_engines(times, len(ranked), num_engines)
    return place_groups(ranked, sizes, history, step, expected)


def place_prompts(
    config: TrainConfig,
    prompt_keys: Sequence[str],
    history: Mapping[str, LengthHistory],
    step: int,
    num_engines: int,
    rollout_time: RolloutTime | None = None,
    expected: ExpectedPasses = TOKENS,
) -> tuple[Placement, float | None]:
    """Placement of a step, by what is known of its prompts, and how much longer responses may grow
    before they are outliers; None where prompts are not ranked. Real runs and simulated ones ask
    here."""
    if not (config.ranks_prompts and history):
        medians = {key: lengths.median_tokens for key, lengths in history.items()}
        return Placement(deal_groups(prompt_keys, medians, num_engines, expected)), None
    settings, group_size = config.histopipe, config.rollout.group_size
    about = (prompt_keys, history, step, num_engines, group_size, rollout_time, expected)
    return plan_placement(settings, *about), length_growth(history, settings.min_growth)


def time_rollouts(config: TrainConfig, latency: Latency | None, window: int) -> RolloutTime | None:
    """Estimate of rollout times by which engines are allocated; None where they are not, or no time
    is known. `window`: draft tokens that a pass verifies for each request."""
    if latency is None or not config.histopipe.two_tier:
        return None
    rollout = config.rollout
    known = {"max_num_seqs": rollout.max_num_seqs, "window": window}
    return partial(estimate_rollout_s, latency, rollout.tp_degree, **known)


def place_groups(
    ranked: Sequence[Sequence[str]],
    sizes: Sequence[int],
    history: Mapping[str, LengthHistory],
    step: int,
    expected: ExpectedPasses = TOKENS,
) -> Placement:
    """Every prompt on an engine of its ranking group, the most expected passes first on each
    engine.

    `ranked`: prompts of each ranking group; `sizes`: engines of each, all positive.

    "During odd-numbered rollout steps, the scheduler assigns ranking groups to workers (0 through
    N-1) in ascending order of rollout length. Conversely, during even-numbered steps, ranking
    groups are assigned in descending order" (6.2). Within a ranking group prompts are dealt by
    expected passes (`deal_groups`), which the paper leaves open; a prompt's samples stay together.
    """
    assert min(sizes) > 0
    tokens = expected_tokens([key for keys in ranked for key in keys], history)
    passes = expected.of(tokens)
    groups: list[PromptGroup] = []
    ranking_groups = []
    for rank, (keys, size, end) in enumerate(zip(ranked, sizes, accumulate(sizes), strict=True)):
        ascending = range(end - size, end)
        engines = [engine if step % 2 else sum(sizes) - 1 - engine for engine in ascending]
        lengths = {key: tokens[key] for key in keys}
        # The longest ranking group is submitted first.
        groups = [*_deal(lengths, history, rank, engines, expected), *groups]
        known = (history[key].longest_tokens for key in keys if key in history)
        ranking_groups.append(
            RankingGroup(
                engines=tuple(sorted(engines)),
                num_prompts=len(keys),
                representative_tokens=sum(lengths.values()) / len(keys),
                representative_passes=sum(passes[key] for key in keys) / len(keys),
                longest_tokens=max(known, default=0),
            )
        )
    return Placement(tuple(groups), tuple(ranking_groups))


def _deal(
    lengths: Mapping[str, float],
    history: Mapping[str, LengthHistory],
    rank: int,
    engines: Sequence[int],
    expected: ExpectedPasses,
) -> list[PromptGroup]:
    unknown = {"expected_tokens": None, "expected_passes": None}
    return [
        group.model_copy(
            update={"engine": engines[group.engine], "ranking_group": rank}
            | ({} if group.prompt_key in history else unknown)
        )
        for group in deal_groups(list(lengths), lengths, len(engines), expected)
    ]
