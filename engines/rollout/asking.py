"""Policies are asked in the event loop, or in a thread beside it.

A controller of 512 engines thinks for some 60 ms, in which the loop of a run would see no token.
One question is out at a time, so that policies need no locks. Virtual time does not wait for a
thread: simulations ask in the loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from engines.bounded import wait_for
from engines.rollout.moves import Move, Opening, Policy, Reshape, RolloutView

M = TypeVar("M", bound=Move)
DECIDE_TIMEOUT_S = 60.0
"""Longest time for one decision in a thread."""


async def decide(policy: Policy, view: RolloutView, *, aside: bool) -> Sequence[Move]:
    return await _ask(policy, partial(policy.decide, view), aside)


async def begin(policy: Policy, view: RolloutView, *, aside: bool) -> Sequence[Reshape]:
    """Nothing from one that does not decide on how stages begin."""
    if not isinstance(policy, Opening):
        return ()
    return await _ask(policy, partial(policy.begin, view), aside)


async def _ask(policy: Policy, question: Callable[[], Sequence[M]], aside: bool) -> Sequence[M]:
    if not aside:
        return question()
    try:
        return await wait_for(asyncio.to_thread(question), DECIDE_TIMEOUT_S)
    except TimeoutError as late:
        raise TimeoutError(
            f"{type(policy).__name__} took more than {DECIDE_TIMEOUT_S:g} s to decide on moves: "
            "switch off what it decides on, or name fewer pat.tp_degrees"
        ) from late
