"""Ranking groups put on engines, in turn from both ends (RhymeRL, section 6.2). Pure.

odd steps     engine 0 ─ shortest group ─┬─ .. ─┬─ longest group ─ engine N - 1
even steps    the mirror image: engine i gets what engine N - 1 - i gets on odd steps
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from engines.histopipe.allocation import allocate_engines
from engines.histopipe.dealing import deal_groups
from engines.histopipe.estimate import expected_lengths
from engines.histopipe.ranking import (
    default_num_groups,
    divide_evenly,
    expected_tokens,
    rank_prompts,
    typical_tokens,
)
from schemas.config import HistoPipeConfig
from schemas.rollout import LengthHistory
from schemas.step import PromptGroup, RankingGroup

RolloutTime = Callable[[np.ndarray, int], float]
"""(response tokens [prompts, samples], engines) -> seconds; `estimate.estimate_rollout_s` with
everything else bound."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one step: what a `StepPlan` has under the same names."""

    groups: tuple[PromptGroup, ...]
    """Prompts in order of submission."""
    ranking_groups: tuple[RankingGroup, ...]
    """Ranking groups from the shortest responses to the longest."""


def plan_placement(
    config: HistoPipeConfig,
    prompt_keys: Sequence[str],
    history: Mapping[str, LengthHistory],
    step: int,
    num_engines: int,
    group_size: int,
    rollout_time: RolloutTime | None = None,
) -> Placement:
    """Rank, allocate and place. Without `rollout_time` each ranking group gets as many engines."""
    num_groups = config.num_ranking_groups or default_num_groups(num_engines)
    num_groups = min(num_groups, num_engines)
    engines_per_group = None
    if rollout_time:
        ranked = rank_prompts(prompt_keys, history, num_groups)
        lengths = [expected_lengths(keys, history, group_size) for keys in ranked]
        engines_per_group = allocate_engines(
            lambda group, engines: rollout_time(lengths[group], engines), len(ranked), num_engines
        )
    return place_groups(prompt_keys, history, step, num_engines, num_groups, engines_per_group)


def place_groups(
    prompt_keys: Sequence[str],
    history: Mapping[str, LengthHistory],
    step: int,
    num_engines: int,
    num_groups: int,
    engines_per_group: Sequence[int] | None = None,
) -> Placement:
    """Every prompt on an engine of its ranking group, the longest expected first on each engine.

    "During odd-numbered rollout steps, the scheduler assigns ranking groups to workers (0 through
    N-1) in ascending order of rollout length. Conversely, during even-numbered steps, ranking
    groups are assigned in descending order" (6.2). Within a ranking group prompts are dealt by
    expected length (`dealing.deal_groups`), which the paper leaves open; a prompt's samples stay
    together. Without `engines_per_group` engines are divided as equally as prompts are, the longer
    groups first to get one more. In a first epoch nothing can be ranked: use `deal_groups`.
    """
    assert any(key in history for key in prompt_keys), "nothing to rank by"
    ranked = rank_prompts(prompt_keys, history, min(num_groups, num_engines))
    sizes = engines_per_group or divide_evenly(num_engines, len(ranked))
    assert len(sizes) == len(ranked)
    assert min(sizes) > 0
    assert sum(sizes) == num_engines
    ends = tuple(accumulate(sizes))
    typical = typical_tokens(prompt_keys, history)
    groups: list[PromptGroup] = []
    ranking_groups = []
    for rank, (keys, size, end) in enumerate(zip(ranked, sizes, ends, strict=True)):
        engines = tuple(_side(engine, step, num_engines) for engine in range(end - size, end))
        # The longest ranking group is submitted first.
        groups = [*_deal(keys, history, typical, rank, engines), *groups]
        ranking_groups.append(_describe(keys, history, typical, engines))
    return Placement(tuple(groups), tuple(ranking_groups))


def _side(engine: int, step: int, num_engines: int) -> int:
    return engine if step % 2 else num_engines - 1 - engine


def _deal(
    keys: Sequence[str],
    history: Mapping[str, LengthHistory],
    typical: float,
    rank: int,
    engines: Sequence[int],
) -> list[PromptGroup]:
    lengths = {key: expected_tokens(key, history, typical) for key in keys}
    return [
        PromptGroup(
            prompt_key=group.prompt_key,
            engine=engines[group.engine],
            expected_tokens=group.expected_tokens if group.prompt_key in history else None,
            ranking_group=rank,
        )
        for group in deal_groups(keys, lengths, len(engines))
    ]


def _describe(
    keys: Sequence[str],
    history: Mapping[str, LengthHistory],
    typical: float,
    engines: Sequence[int],
) -> RankingGroup:
    return RankingGroup(
        engines=tuple(sorted(engines)),
        num_prompts=len(keys),
        representative_tokens=sum(expected_tokens(key, history, typical) for key in keys)
        / len(keys),
        longest_tokens=max(
            (history[key].longest_tokens for key in keys if key in history), default=0
        ),
    )
