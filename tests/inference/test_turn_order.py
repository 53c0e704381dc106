"""Returning turns in vLLM's queue, and their keys and values, with a KV cache for half of all
conversations. The scheduler and its prefix cache are real, and no model runs."""

import random
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from refrain.benchmarks.scheduling import (
    BLOCK_TOKENS,
    Core,
    FakeRunner,
    make_request,
    make_scheduler,
    vllm_config,
)
from refrain.engines.inference.engine.admission import _core_request, admitted
from refrain.engines.inference.engine.running import Running
from refrain.schemas.rollout import RolloutRequest
from tests.inference.real import CONFIG, requests

pytestmark = pytest.mark.engine
SLOTS, CONVERSATIONS, PROMPT_TOKENS = 8, 64, 24
NUM_TURNS, OBSERVED_TOKENS = 4, 12


@dataclass
class Talk:
    """A conversation, its tokens so far, and the tokens of each turn that is to come."""

    running: Running
    tokens: list[int]
    turns: list[int]

    @property
    def num_full_blocks(self) -> int:
        """Full KV blocks when its turn has ended. The last token has no keys and values."""
        return (len(self.tokens) - 1) // BLOCK_TOKENS


def make_talks(rng: random.Random) -> list[Talk]:
    prompts = [tuple(range(first, first + PROMPT_TOKENS)) for first in range(2, 2 + CONVERSATIONS)]
    given: list[RolloutRequest] = requests(prompts)[::4]
    return [
        Talk(
            Running(request, 0, 0.0),
            [*prompt],
            [rng.randint(20, 60) for _ in range(NUM_TURNS)],
        )
        for request, prompt in zip(given, prompts, strict=True)
    ]


def final_blocks(talk: Talk) -> int:
    num_tokens = len(talk.tokens) + sum(talk.turns) + OBSERVED_TOKENS * (NUM_TURNS - 1)
    return -(-num_tokens // BLOCK_TOKENS)


def cached_share(policy: str) -> float:
    """Return the share of full KV blocks that are in the prefix cache when a turn returns."""
    from refrain.engines.inference.engine.scheduler import HoldingScheduler

    rng = random.Random(0)
    talks = make_talks(rng)
    config = vllm_config(is_async=False, max_num_seqs=SLOTS, scheduling_policy=policy)
    scheduler = make_scheduler(HoldingScheduler, config, sum(map(final_blocks, talks)) // 2)
    core, number, num_cached, num_full = Core(scheduler, FakeRunner()), 0, 0, 0
    returning: dict[int, list[Talk]] = defaultdict(list, {0: talks})
    known: dict[str, tuple[Talk, int]] = {}
    while returning or scheduler.has_unfinished_requests():
        for talk in returning.pop(number, ()):
            id = f"{talks.index(talk)}/{len(talk.turns)}"
            own = make_request(id, talk.tokens, talk.turns.pop(0), priority=talk.running.arrival)
            talk.running = talk.running.with_answer(talk.running.request)
            scheduler.add_request(own)
            known[id] = talk, (len(talk.tokens) - OBSERVED_TOKENS - 1) // BLOCK_TOKENS
        number += 1
        for one in core.step()[1] if scheduler.has_unfinished_requests() else ():
            talk, full = known[one.request_id]
            talk.tokens += one.new_token_ids
            if one.prefill_stats and len(talk.turns) < NUM_TURNS - 1:
                num_cached += one.prefill_stats.num_cached_tokens // BLOCK_TOKENS
                num_full += full
            if one.finished and talk.turns:
                talk.tokens += range(100, 100 + OBSERVED_TOKENS)
                returning[number + rng.randint(5, 50)].append(talk)
    return num_cached / num_full


def test_a_returning_turn_finds_its_prefix():
    """First come, first served, it waits behind all new conversations, which take its blocks."""
    in_order, by_arrival = cached_share("fcfs"), cached_share("priority")
    assert by_arrival > 0.95
    assert in_order < 0.7


def test_a_turn_reaches_vllm_with_the_number_of_its_conversation():
    from vllm.v1.engine.input_processor import InputProcessor

    llm = SimpleNamespace(input_processor=InputProcessor(vllm_config(is_async=False)))
    earlier, later = (Running(request, 0, 0.0) for request in requests([(5, 6, 7)])[:2])
    turns = later, earlier.with_answer(earlier.request)
    given = [admitted(one, CONFIG.engine, print) for one in turns]
    found = [_core_request(llm, one, ("batch", 2)).priority for one in given]
    assert found == [later.arrival, earlier.arrival]
    assert found == sorted(found, reverse=True)
