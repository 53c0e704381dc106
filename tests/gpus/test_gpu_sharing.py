"""Turns on shared GPUs: there are never two owners, whatever the order of requests and failures."""

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.gpus.gpu_sharing import Role, TurnFailed, Turns
from refrain.engines.simulate.clock import run_virtual

ENGINES, TRAINER = Role


class Memory:
    """GPU memory that only one role may hold at a time."""

    def __init__(self):
        self.holders = set()


class Owner:
    """Enters and leaves in `slow_s`. `fails_in` names the call that fails, if any."""

    def __init__(self, memory, role, slow_s=0.0, fails_in=None):
        self.memory, self.role, self.slow_s, self.fails_in = memory, role, slow_s, fails_in
        self.at_work = 0

    async def leave_gpus(self):
        assert not self.at_work, "work is under way"
        await asyncio.sleep(self.slow_s)
        self.memory.holders.discard(self.role)
        self._fail("leave")

    async def enter_gpus(self):
        assert not self.memory.holders, f"{self.memory.holders} are there"
        await asyncio.sleep(self.slow_s)
        self._fail("enter")
        self.memory.holders.add(self.role)

    def _fail(self, method):
        if self.fails_in == method:
            raise RuntimeError(f"the {self.role.value} died in {method}")


def made(slow_s=0.0, fails_in=(None, None), first=ENGINES):
    memory = Memory()
    owners = {
        role: Owner(memory, role, slow_s, of) for role, of in zip(Role, fails_in, strict=True)
    }
    memory.holders.add(first)
    return Turns(owners, first), owners, memory


async def work(turns, owners, memory, role, at_s, for_s):
    await asyncio.sleep(at_s)
    async with turns.of(role):
        owners[role].at_work += 1
        try:
            assert memory.holders == {role}
            assert turns.has is role
            await asyncio.sleep(for_s)
            assert memory.holders == {role}
        finally:
            owners[role].at_work -= 1


seconds = st.sampled_from([0.0, 0.001, 0.01, 0.1])
jobs = st.lists(st.tuples(st.sampled_from(Role), seconds, seconds), min_size=1, max_size=12)
failures = st.sampled_from([None, None, "leave", "enter"])


@settings(max_examples=300, deadline=None)
@given(
    jobs=jobs,
    slow_s=seconds,
    fails_in=st.tuples(failures, failures),
    first=st.sampled_from(Role),
    seed=st.integers(0, 999),
)
def test_gpus_never_have_two_owners(jobs, slow_s, fails_in, first, seed):
    random = Random(seed)

    async def all_jobs():
        turns, owners, memory = made(slow_s, fails_in, first)
        tasks = [
            asyncio.create_task(work(turns, owners, memory, role, at_s, for_s))
            for role, at_s, for_s in jobs
        ]
        cancelled = random.choice(tasks) if seed % 3 == 0 else None
        if cancelled:
            asyncio.get_running_loop().call_later(0.01, cancelled.cancel)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for result in ended:
            expected = (RuntimeError, TurnFailed, asyncio.CancelledError)
            assert result is None or isinstance(result, expected)
            assert not isinstance(result, AssertionError)
        if not any(fails_in) and not cancelled:
            assert ended == [None] * len(jobs)

    run_virtual(all_jobs())


def test_gpus_change_hands_only_when_needed():
    async def steps():
        turns, _, memory = made()
        for role in (ENGINES, ENGINES, TRAINER, TRAINER):
            async with turns.of(role):
                assert memory.holders == {role}
        assert turns.has is TRAINER
        assert turns.shared

    run_virtual(steps())


def test_gpus_have_no_owner_after_a_failure():
    async def steps():
        turns, _, memory = made(fails_in=(None, "enter"))
        with pytest.raises(RuntimeError, match="the trainer died in enter"):
            async with turns.of(TRAINER):
                pass
        assert turns.has is None
        assert not memory.holders
        with pytest.raises(TurnFailed, match="failed hand-over: the trainer died in enter"):
            async with turns.of(ENGINES):
                pass

    run_virtual(steps())


def test_turns_without_owners_do_not_wait():
    async def steps():
        turns = Turns({}, ENGINES)
        async with turns.of(TRAINER), turns.of(ENGINES):
            assert not turns.shared

    run_virtual(steps())
