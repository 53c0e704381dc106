"""Order the prompts of an epoch: of one source or of several by weight, with or without a
curriculum. Pure.

    weights ──num_draws──► draws of each source ──spread──► the source of each place of an epoch
    seed, epoch, skipped prompts ──order_of──► the prompts of each source, one after the other

An epoch has as many places as the sources have prompts. A source of small weight comes in part, and
the next epoch goes on behind that part. A source of large weight comes more than once.
"""

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from refrain.schemas.data import PassRate
from refrain.schemas.inputs import CurriculumConfig

Rank = Callable[[str, int], Any]
"""Function of a prompt and of the times that the epoch has drawn it: the lowest comes next."""


@dataclass(frozen=True)
class Portion:
    """One source's prompts, and its weight beside the others."""

    name: str
    keys: tuple[str, ...]
    weight: float = 1.0


class Mixture:
    """The places of an epoch, and the draws that fill them."""

    def __init__(self, portions: Sequence[Portion], prompts_per_step: int) -> None:
        """Raises ValueError when a source has no place in an epoch, or fewer prompts than a step
        draws from it."""
        self.portions = tuple(portions)
        self.nums = num_draws(self.portions)
        self._places = spread(self.nums)
        self._most = _most_in_a_step(self._places, prompts_per_step)
        for at, portion in enumerate(self.portions):
            _check(portion, self._most[at], prompts_per_step)

    def lines(self) -> list[str]:
        """Return a sentence about each source of several."""
        total, several = sum(self.nums), len(self.portions) > 1
        return [
            f"source {one.name}: {len(one.keys):,} prompts, {num / total:.1%} of each step; an "
            f"epoch draws each {num / len(one.keys):.2g} times"
            for one, num in zip(self.portions, self.nums, strict=True)
            if several
        ]

    def order(
        self,
        epoch: int,
        seed: int,
        *,
        shuffle: bool,
        skipped: Collection[str] = (),
        max_repeats: int = 1,
    ) -> tuple[str, ...]:
        """Return the prompts of an epoch in order. No step draws one twice."""
        draws = [
            order_of(
                portion.keys,
                num,
                self._most[at],
                epoch,
                seed,
                shuffle=shuffle,
                skipped=skipped,
                max_repeats=max_repeats,
            )
            for at, (portion, num) in enumerate(zip(self.portions, self.nums, strict=True))
        ]
        return tuple(next(draws[portion]) for portion in self._places)


def num_draws(portions: Sequence[Portion]) -> list[int]:
    """Return how many prompts an epoch draws from each source: its share by weight of all prompts,
    rounded by largest remainders."""
    total, weight = sum(len(one.keys) for one in portions), sum(one.weight for one in portions)
    exact = [total * one.weight / weight for one in portions]
    nums = [math.floor(one) for one in exact]
    first = sorted(range(len(exact)), key=lambda at: nums[at] - exact[at])
    for at in first[: total - sum(nums)]:
        nums[at] += 1
    return nums


def spread(nums: Sequence[int]) -> list[int]:
    """Return the source of each place, so that each source comes evenly over the epoch."""
    places = [((at + 0.5) / num, one) for one, num in enumerate(nums) for at in range(num)]
    return [one for _, one in sorted(places)]


def order_of(
    keys: Sequence[str],
    num: int,
    gap: int,
    epoch: int,
    seed: int,
    *,
    shuffle: bool,
    skipped: Collection[str] = (),
    max_repeats: int = 1,
) -> Iterator[str]:
    """Yield `num` prompts of a source, for one epoch. The same arguments give the same order.

    Each pass over the source has another order, or that of `keys` without `shuffle`. The last pass
    may cover a part: the parts of consecutive epochs follow each other. `gap`: draws within which
    no prompt comes twice, at most as many as there are keys. Prompts of `skipped` come after the
    others have come `max_repeats` times.
    """
    passes, rest = divmod(num, len(keys))
    fixed = (
        sorted(keys, key=lambda key: stable_hash(f"{seed}/{key}")) if shuffle and rest else [*keys]
    )
    begin = epoch * num % len(keys)
    place = {key: at for at, key in enumerate(fixed[begin:] + fixed[:begin])}

    def rank(key: str, times: int) -> Any:
        again = f"/{times}" if times else ""
        # Sort by a hash, because random.shuffle may differ between Python versions.
        order = stable_hash(f"{seed}/{epoch}{again}/{key}") if shuffle else place[key]
        left_out = times == passes and place[key] >= rest
        skips = key in skipped
        return times + max_repeats * skips, not skips, left_out, order

    return _lowest(keys, num, gap, rank)


def _lowest(keys: Sequence[str], num: int, gap: int, rank: Rank) -> Iterator[str]:
    """Yield the prompt of the lowest rank `num` times, without the last `gap - 1` ones."""
    waiting = [(rank(key, 0), key, 0) for key in keys]
    heapify(waiting)
    resting: deque[tuple[str, int]] = deque()
    for _ in range(num):
        if len(resting) == gap:
            key, times = resting.popleft()
            heappush(waiting, (rank(key, times), key, times))
        _, key, times = heappop(waiting)
        yield key
        resting.append((key, times + 1))


def skipped(
    rates: Mapping[str, PassRate], settings: CurriculumConfig, epoch: int
) -> frozenset[str]:
    """Return the prompts that an epoch skips: those drawn at most `skip_epochs` ago whose pass rate
    is outside the window.

    DAPO (arXiv:2503.14476, section 3.2) drops groups that are all right or all wrong after it has
    generated them. This predicts them from the prompt's last group instead, so some of them pass.
    """
    least, most = settings.min_pass_rate, settings.max_pass_rate
    return frozenset(
        key
        for key, (rate, drawn) in rates.items()
        if not least < rate < most and epoch - drawn <= settings.skip_epochs
    )


def _most_in_a_step(places: Sequence[int], prompts_per_step: int) -> Counter[int]:
    """Return the most prompts that a step of an epoch draws from each source."""
    most: Counter[int] = Counter()
    for start in range(0, len(places), prompts_per_step):
        most |= Counter(places[start : start + prompts_per_step])
    return most


def _check(portion: Portion, most: int, prompts_per_step: int) -> None:
    name, size = portion.name, len(portion.keys)
    if not most:
        raise ValueError(
            f"source {name!r} of data.train has weight {portion.weight:g}, too little for one "
            "prompt of an epoch: raise it, or remove the source"
        )
    if most > size:
        raise ValueError(
            f"source {name!r} of data.train has {size} prompts, but by its weight a step draws "
            f"{most} different ones from it (prompts_per_step and rollout.oversample give "
            f"{prompts_per_step} in all): lower its weight or prompts_per_step, or add prompts"
        )


def stable_hash(text: str) -> str:
    """Return a hash that is the same in every process and release."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
