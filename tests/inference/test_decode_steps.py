"""The fast steps of our schedulers are the steps that vLLM's schedulers build.

Both run side by side on the same requests, with arrivals, aborts, drafts, stop tokens and a KV
cache that is too small for all. They must schedule the same and report the same tokens.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

from refrain.benchmarks.scheduling import (
    BLOCK_TOKENS,
    Core,
    FakeRunner,
    make_request,
    make_scheduler,
    model_runner,
    token_of,
    vllm_config,
)

pytestmark = pytest.mark.engine
MAX_DRAFT, MAX_ROWS = 5, 12
STOPS = 100
"""One token in this many ends its request."""
ROOMY, TIGHT = 4000, 24
"""Blocks of the KV cache. A tight one makes vLLM preempt requests."""


@dataclass
class Told:
    """All that the front end was told of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: Any = None
    num_cached: Any = None


class Side:
    """A scheduler at work, and what it has reported."""

    def __init__(
        self, kind: Any, is_async: bool, drafts: bool, num_blocks: int, policy: str
    ) -> None:
        config = vllm_config(
            is_async=is_async,
            max_draft=MAX_DRAFT if drafts else 0,
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=256,
            scheduling_policy=policy,
        )
        self.scheduler = make_scheduler(kind, config, num_blocks)
        runner = FakeRunner(STOPS, drafted, self.scheduler.use_v2_model_runner)
        self.core = Core(self.scheduler, runner, num_placeholders)
        self.told: dict[str, Told] = defaultdict(Told)
        self.num_fast = 0

    def step(self) -> tuple[Any, ...]:
        """Run a step. Return what was scheduled, which requests ended, and the state after it."""
        step, outputs = self.core.step()
        for one in outputs:
            told = self.told[one.request_id]
            told.tokens += one.new_token_ids
            told.logprobs += one.new_logprobs.logprobs[:, 0].tolist()
            stats = one.prefill_stats
            told.num_cached = stats.num_cached_tokens if stats else told.num_cached
            if one.finished:
                drafting = one.spec_decode_metrics
                told.end = (one.finish_reason, one.stop_reason, drafting and vars(drafting))
        ended = sorted(one.request_id for one in outputs if one.finished)
        return scheduled(step), ended, state(self.scheduler)


def scheduled(step: Any) -> dict[str, Any]:
    """Return the fields of a step. Copy the lists of tokens, which grow later."""
    cached = dict(vars(step.scheduled_cached_reqs))
    cached["all_token_ids"] = {id: list(all) for id, all in cached["all_token_ids"].items()}
    new = [
        vars(one) | {"prefill_token_ids": list(one.prefill_token_ids or ())}
        for one in step.scheduled_new_reqs
    ]
    return vars(step) | {"scheduled_cached_reqs": cached, "scheduled_new_reqs": new}


def state(scheduler: Any) -> tuple[Any, ...]:
    """Return the counters of the scheduler and of its running requests."""
    cached = scheduler.kv_cache_manager.coordinator.single_type_managers[0].num_cached_block
    counters = {
        one.request_id: (
            one.num_tokens,
            one.num_computed_tokens,
            one.num_in_flight_tokens,
            one.num_output_placeholders,
            list(one.spec_token_ids),
            one.next_decode_eligible_step,
            cached.get(one.request_id),
        )
        for one in scheduler.running
    }
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return counters, free, scheduler.current_step, set(scheduler.prev_step_scheduled_req_ids)


def drafted(id: str, num_tokens: int) -> list[int]:
    """Return drafts of random length that are right up to a random place."""
    rng = random.Random(f"{id}/{num_tokens}")
    drafts = [token_of(id, num_tokens + i, STOPS) for i in range(rng.randint(0, MAX_DRAFT))]
    return [t if i < (right := rng.randint(0, 9)) else right + 2 for i, t in enumerate(drafts)]


def num_placeholders(id: str, num_tokens: int) -> int:
    """Return a random number of drafts."""
    return random.Random(f"{id}:{num_tokens}").randint(0, MAX_DRAFT)


def kinds(is_async: bool) -> tuple[Any, Any]:
    """Return vLLM's scheduler class and ours."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from refrain.engines.inference.engine.scheduler import HoldingAsyncScheduler, HoldingScheduler

    return (AsyncScheduler, HoldingAsyncScheduler) if is_async else (Scheduler, HoldingScheduler)


def both(is_async: bool, drafts: bool, num_blocks: int, policy: str) -> tuple[Side, Side]:
    vllm, ours = (Side(kind, is_async, drafts, num_blocks, policy) for kind in kinds(is_async))
    vllm.scheduler.dynamic_sd_lookup = ours.scheduler.dynamic_sd_lookup
    decode_step = ours.scheduler._decode_step

    def counted() -> Any:
        step = decode_step()
        ours.num_fast += step is not None
        return step

    ours.scheduler._decode_step = counted
    return vllm, ours


@pytest.mark.parametrize("num_blocks", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize(("runner", "is_async", "drafts"), [
    (1, True, False), (1, False, False), (1, False, True),
    (2, True, False), (2, False, False), (2, True, True), (2, False, True),
], ids=["async", "sync", "drafts", "v2", "v2-sync", "v2-drafts", "v2-sync-drafts"])  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_vllm(seed, runner, is_async, drafts, num_blocks):
    rng, policy = random.Random(seed), "priority" if seed % 2 else "fcfs"
    with model_runner(runner):
        sides = both(is_async, drafts, num_blocks, policy)
    prompts = [range(2, 2 + rng.randint(1, 3 * BLOCK_TOKENS)) for _ in range(4)]
    num_added, alive, preempted = 0, set(), set()
    for i in range(300):
        if rng.random() < (1.0 if i < MAX_ROWS else 0.06):
            id, prompt, length = f"r{num_added}", rng.choice(prompts), rng.randint(1, 150)
            for side in sides:
                side.scheduler.add_request(
                    make_request(id, prompt, length, priority=num_added % 3, stop_token_ids=[1])
                )
            num_added, alive = num_added + 1, alive | {id}
        if alive and rng.random() < 0.02:
            abort(sides, rng.choice(sorted(alive)))
        (step, ended, after), ours = (side.step() for side in sides)
        assert ours == (step, ended, after)
        alive -= set(ended)
        preempted |= step["preempted_req_ids"]
    while sides[0].scheduler.has_unfinished_requests():
        assert sides[1].step() == sides[0].step()
    assert sides[1].told == sides[0].told
    assert sides[1].num_fast > 100
    assert bool(preempted) == (num_blocks == TIGHT)


@pytest.mark.parametrize(("runner", "is_async"), [(1, False), (2, True), (2, False)])
def test_a_cached_prompt_begins_without_drafts(runner, is_async):
    """vLLM adds as many drafts as fit, of which none can be right."""
    num = []
    for kind in kinds(is_async):
        with model_runner(runner):
            config = vllm_config(is_async=is_async, max_draft=MAX_DRAFT, max_num_seqs=MAX_ROWS)
        scheduler = make_scheduler(kind, config, ROOMY)
        for id in ("first", "second"):
            scheduler.add_request(make_request(id, range(2, 2 * BLOCK_TOKENS + 3), 4))
        step = scheduler.schedule()
        assert step.num_scheduled_tokens["first"] == 2 * BLOCK_TOKENS + 1
        num.append(step.num_scheduled_tokens["second"])
    assert num == [1 + MAX_DRAFT, 1]


def abort(sides: tuple[Side, Side], id: str) -> None:
    from vllm.v1.request import RequestStatus

    for side in sides:
        side.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)
        side.told.pop(id, None)
