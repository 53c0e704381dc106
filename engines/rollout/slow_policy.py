"""Call policies in the event loop, or in a thread beside it.

A decision for 512 engines takes about 60 ms, during which the event loop could handle no token, so
a run uses a thread. Calls never overlap, so policies need no locks. Simulations call policies in
the loop, because virtual time does not wait for threads.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from refrain.engines.rollout.moves import FirstLayout, Move, Policy, Reshape, RolloutView

M = TypeVar("M", bound=Move)
DECIDE_TIMEOUT_S = 60.0
"""Time limit in seconds for one decision in a thread."""
_PARTS = 10


class SlowPolicy(RuntimeError):
    """A policy did not decide in time."""


async def decide(policy: Policy, view: RolloutView, *, in_thread: bool) -> Sequence[Move]:
    return await _ask(policy, partial(policy.decide, view), in_thread)


async def begin(policy: Policy, view: RolloutView, *, in_thread: bool) -> Sequence[Reshape]:
    """Return the policy's layouts for the stage's start, or none if it has no `begin`."""
    if not isinstance(policy, FirstLayout):
        return ()
    return await _ask(policy, partial(policy.begin, view), in_thread)


async def _ask(policy: Policy, question: Callable[[], Sequence[M]], in_thread: bool) -> Sequence[M]:
    if not in_thread:
        return question()
    thinking = asyncio.ensure_future(asyncio.to_thread(question))
    try:
        # Wait in parts. While this process is stopped, for example with its machine, only one part
        # passes.
        for _ in range(_PARTS):
            done, _ = await asyncio.wait({thinking}, timeout=DECIDE_TIMEOUT_S / _PARTS)
            if done:
                return thinking.result()
    finally:
        thinking.cancel()
    raise SlowPolicy(
        f"{type(policy).__name__} took more than {DECIDE_TIMEOUT_S:g} s to decide on moves"
    )
