"""Places prompts on engines in ranking groups, alternating ends (RhymeRL, section 6.2). Pure.

Where a step waits for its last engine, prompts can be placed so that engines end together instead.

odd steps     engine 0 ─ shortest group ─┬─ .. ─┬─ longest group ─ engine N - 1
even steps    mirrored: engine i gets what engine N - 1 - i gets on odd steps
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Protocol

import numpy as np

from refrain.engines.balance import longest_first
from refrain.engines.histopipe.allocation import allocate_engines
from refrain.engines.histopipe.estimate import context_growth, estimate_rollout_s, expected_lengths
from refrain.engines.histopipe.even_ends import cut_evenly, step_requests_of
from refrain.engines.histopipe.passes import TOKENS, ExpectedPasses
from refrain.engines.histopipe.ranking import (
    default_num_groups,
    divide_evenly,
    expected_tokens,
    length_growth,
    rank_prompts,
)
from refrain.engines.latency.interface import Latency
from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import LengthHistory
from refrain.schemas.step import PromptGroup, RankingGroup


class RolloutTime(Protocol):
    """A predictor of a rollout's seconds: `estimate.estimate_rollout_s`, all else bound."""

    def __call__(
        self,
        lengths: np.ndarray,
        num_engines: int,
        *,
        tokens_per_pass: np.ndarray,
        context_per_token: np.ndarray | float = 1.0,
    ) -> float:
        """Return seconds. `lengths` (response tokens) and `tokens_per_pass`: [prompts, samples].
        `context_per_token`: [prompts, 1], or one for all."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one step. Fields as in `StepPlan`."""

    groups: tuple[PromptGroup, ...]
    """Prompts in order of submission."""
    ranking_groups: tuple[RankingGroup, ...] = ()
    """Ranking groups by expected passes, the shortest first."""
    expected_s: float | None = None
    equal_s: float | None = None

    def on(self, engines: Sequence[int]) -> "Placement":
        """Return this placement with engine i replaced by `engines[i]`."""
        groups = [g.model_copy(update={"engine": engines[g.engine]}) for g in self.groups]
        ranking_groups = [
            ranking.model_copy(
                update={"engines": tuple(sorted(engines[e] for e in ranking.engines))}
            )
            for ranking in self.ranking_groups
        ]
        return replace(self, groups=tuple(groups), ranking_groups=tuple(ranking_groups))


def deal_groups(
    prompt_keys: Sequence[str],
    median_lengths: Mapping[str, float],
    num_engines: int,
    expected: ExpectedPasses = TOKENS,
) -> tuple[PromptGroup, ...]:
    """Deal the groups, most expected passes first, each to the engine with the least work so far.

    This is longest-processing-time-first scheduling (Graham, 1969, at most 4/3 of the optimum).
    `median_lengths`: median response tokens of the prompts with a history. A prompt without one
    counts as the mean of these. Groups stay whole, so that the samples of a prompt share its
    prefix. Ties keep the given order.
    """
    assert num_engines > 0
    passes = _passes(prompt_keys, median_lengths, expected)
    shares = longest_first(prompt_keys, passes.__getitem__, num_engines)
    engine_of = {key: engine for engine, share in enumerate(shares) for key in share}
    return _groups(passes, engine_of, median_lengths)


def end_together(
    prompt_keys: Sequence[str],
    median_lengths: Mapping[str, float],
    num_engines: int,
    expected: ExpectedPasses = TOKENS,
    *,
    step_requests: float,
    group_size: int,
    max_num_seqs: int,
) -> tuple[PromptGroup, ...]:
    """Give the longest groups to engines with few others, so that engines end together
    (`even_ends`). Otherwise as `deal_groups`; the other arguments are those of `cut_evenly`."""
    passes = _passes(prompt_keys, median_lengths, expected)
    longest = sorted(passes, key=passes.__getitem__, reverse=True)
    engines = cut_evenly(
        [passes[key] for key in longest],
        num_engines,
        step_requests=step_requests,
        group_size=group_size,
        max_num_seqs=max_num_seqs,
    )
    return _groups(passes, dict(zip(longest, engines, strict=True)), median_lengths)


def deal_for_ends(
    config: TrainConfig,
    prompt_keys: Sequence[str],
    history: Mapping[str, LengthHistory],
    num_engines: int,
    rollout_time: RolloutTime,
    expected: ExpectedPasses = TOKENS,
) -> Placement:
    """Return the placement by `deal_groups` or `end_together`, whichever should end first.
    In a tie, return the former."""
    assert any(key in history for key in prompt_keys), "no history to predict ends from"
    row_of = {key: row for row, key in enumerate(prompt_keys)}
    rollout = config.rollout
    lengths = expected_lengths(prompt_keys, history, rollout.group_size)
    rates = lengths / expected.table(prompt_keys, lengths)
    growth = context_growth(prompt_keys, history)

    def ends_s(rows: list[int]) -> float:
        own = {"tokens_per_pass": rates[rows], "context_per_token": growth[rows]}
        return rollout_time(lengths[rows], 1, **own)

    def last_end_s(groups: Sequence[PromptGroup]) -> float:
        rows: dict[int, list[int]] = {}
        for group in groups:
            rows.setdefault(group.engine, []).append(row_of[group.prompt_key])
        return max(map(ends_s, rows.values()))

    def steps_s(batch: int) -> float:
        typical, rate = (np.full((batch, 1), of.mean()) for of in (lengths, rates))
        return rollout_time(
            typical, 1, tokens_per_pass=rate, context_per_token=float(growth.mean())
        )

    batch = min(lengths.size // num_engines, rollout.max_num_seqs // 2)
    about = (prompt_keys, {key: of.median_tokens for key, of in history.items()}, num_engines)
    dealt = deal_groups(*about, expected)
    ending = end_together(
        *about,
        expected,
        step_requests=step_requests_of(steps_s, max(1, batch)),
        group_size=rollout.group_size,
        max_num_seqs=rollout.max_num_seqs,
    )
    equal_s, end_s = last_end_s(dealt), last_end_s(ending)
    groups, expected_s = (ending, end_s) if end_s < equal_s else (dealt, equal_s)
    return Placement(groups, expected_s=expected_s, equal_s=equal_s)


def plan_placement(
    prompt_keys: Sequence[str],
    history: Mapping[str, LengthHistory],
    step: int,
    num_engines: int,
    group_size: int,
    rollout_time: RolloutTime | None = None,
    expected: ExpectedPasses = TOKENS,
    num_groups: int | None = None,
) -> Placement:
    """Rank prompts, allocate engines and place. Without `rollout_time`, engines are divided as
    evenly as prompts. The first epoch has no history to rank by: use `deal_groups`. `num_groups`:
    ranking groups, by default `default_num_groups`."""
    assert any(key in history for key in prompt_keys), "nothing to rank by"
    num_groups = num_groups or default_num_groups(num_engines)
    ranked = rank_prompts(prompt_keys, history, min(num_groups, num_engines), expected)
    if rollout_time is None:
        sizes = divide_evenly(num_engines, len(ranked))
        return place_groups(ranked, sizes, history, step, expected)
    lengths = [expected_lengths(keys, history, group_size) for keys in ranked]
    rates = [of / expected.table(keys, of) for keys, of in zip(ranked, lengths, strict=True)]
    growth = [context_growth(keys, history) for keys in ranked]

    def times(group: int, engines: int) -> float:
        own = {"tokens_per_pass": rates[group], "context_per_token": growth[group]}
        return rollout_time(lengths[group], engines, **own)

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
    """Place the prompts of a step by their history, if any. Real and simulated runs call this.

    Also return the growth factor above which a response is an outlier, or None if prompts are not
    ranked.
    """
    if history and rollout_time and not config.staleness and config.specactor.races:
        about = (prompt_keys, history, num_engines, rollout_time, expected)
        return deal_for_ends(config, *about), None
    if not (config.ranks_prompts and history):
        medians = {key: lengths.median_tokens for key, lengths in history.items()}
        return Placement(deal_groups(prompt_keys, medians, num_engines, expected)), None
    group_size = config.rollout.group_size
    about = (prompt_keys, history, step, num_engines, group_size, rollout_time, expected)
    return plan_placement(*about), length_growth(history, config.histopipe.min_growth)


def time_rollouts(
    config: TrainConfig,
    latency: Latency | None,
    window: int,
    max_context_tokens: float = math.inf,
) -> RolloutTime | None:
    """Return the estimate of rollout times for placement. None if no latency is known.

    `window`: draft tokens that a pass verifies for each request. `max_context_tokens`: tokens that
    an engine's KV cache holds.
    """
    if latency is None:
        return None
    rollout = config.rollout
    return partial(
        estimate_rollout_s,
        latency,
        rollout.tp_degree,
        max_num_seqs=rollout.max_num_seqs,
        window=window,
        max_context_tokens=max_context_tokens,
    )


def place_groups(
    ranked: Sequence[Sequence[str]],
    sizes: Sequence[int],
    history: Mapping[str, LengthHistory],
    step: int,
    expected: ExpectedPasses = TOKENS,
) -> Placement:
    """Place each prompt on an engine of its ranking group, most expected passes first.

    `ranked`: prompts of each ranking group; `sizes`: engines of each, all positive.

    "During odd-numbered rollout steps, the scheduler assigns ranking groups to workers (0 through
    N-1) in ascending order of rollout length. Conversely, during even-numbered steps, ranking
    groups are assigned in descending order" (6.2). The paper leaves open how prompts are dealt
    within a ranking group: here by expected passes (`deal_groups`), a prompt's samples together.
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


def _passes(
    prompt_keys: Sequence[str], median_lengths: Mapping[str, float], expected: ExpectedPasses
) -> dict[str, float]:
    known = [median_lengths[key] for key in prompt_keys if key in median_lengths]
    typical = fmean(known) if known else 1.0
    return expected.of({key: median_lengths.get(key, typical) for key in prompt_keys})


def _groups(
    passes: Mapping[str, float], engine_of: Mapping[str, int], median_lengths: Mapping[str, float]
) -> tuple[PromptGroup, ...]:
    """Return the groups, most passes first."""
    return tuple(
        PromptGroup(
            prompt_key=key,
            engine=engine_of[key],
            expected_tokens=median_lengths.get(key),
            expected_passes=passes[key] if key in median_lengths else None,
        )
        for key in sorted(passes, key=passes.__getitem__, reverse=True)
    )
