"""The scheduler of live sequences leaves some steps to vLLM's scheduler.

The tests force such steps. The tokens are the same.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from refrain.engines.inference.drafting.draft_link import Feedback, encode
from refrain.engines.inference.drafting.vllm_drafter import VLLMDrafter
from refrain.engines.specactor.streams import Drafted, Opened, Verified
from tests.inference.real import CONFIG
from tests.inference.test_live import BLOCK, MAX_NUM_SEQS, PROMPT, begin, doing, from_the_start

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_BLOCKS = 14
BLOCK_BYTES = 16384
"""Bytes of a block of the demo's drafter."""
STEP_TOKENS = 32
LENGTH = 256


@pytest.fixture(scope="module")
def do(ray_cluster) -> Iterator[Callable]:
    yield from doing(
        ray_cluster,
        max_num_batched_tokens=STEP_TOKENS,
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES,
    )


class Paths:
    """Context that counts the steps of our scheduler, and why vLLM's scheduler makes the others.

    At its end it closes all sequences.
    """

    def __init__(self, live: Any) -> None:
        self.live, self.scheduler, self.counts = live, live._scheduler, Counter()

    def __enter__(self) -> Counter:
        own, new_blocks = self.scheduler._decode_step, self.scheduler._new_blocks

        def decode_step() -> Any:
            waits = self.scheduler.get_request_counts()[1]
            step = own()
            self.counts["brief" if step else "waiting" if waits else "other"] += 1
            return step

        def blocks(*args: Any) -> Any:
            given = new_blocks(*args)
            self.counts["too few blocks"] += given is None
            return given

        self.scheduler._decode_step, self.scheduler._new_blocks = decode_step, blocks
        return self.counts

    def __exit__(self, *_: object) -> None:
        del self.scheduler._decode_step, self.scheduler._new_blocks
        for name in list(self.live._texts):
            self.live.close(name)


class Drafter(VLLMDrafter):
    """A drafter that uses existing live sequences and keeps the drafts that it sends."""

    def __init__(self, live: Any) -> None:
        super().__init__(CONFIG.engine.drafter_processes[0])
        self._live, self._ends, self._socket = live, frozenset(), self
        self.told: list[Drafted] = []

    def send_multipart(self, parts: Any) -> None:
        self.told += msgspec.msgpack.decode(parts[1], type=list[Drafted])


def drawn_by_all(live: Any, names: list[str], num: int) -> dict[str, list[int]]:
    """Return `num` tokens of each sequence. They decode together as far as there is room."""
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(40 * num):
        if not (wanting := {name for name in names if len(tokens[name]) < num}):
            return tokens
        for name, token in live.go_on(wanting).items():
            tokens[name].append(token)
    raise AssertionError(f"{ {name: len(some) for name, some in tokens.items()} } of {num}")


@pytest.mark.slow
def test_vllm_admits_waiting_sequences_while_others_continue(do):
    """vLLM admits a waiting sequence once a place is free. The others keep decoding."""

    def work(live):
        names = [f"w-{i}" for i in range(MAX_NUM_SEQS + 1)]
        right = {n: from_the_start(live, PROMPT[:8], 20, key=i) for i, n in enumerate(names)}
        live._core.reset_prefix_cache()
        *running, late, last = names
        tokens: dict[str, list[int]] = {name: [] for name in names}

        def go_on(*wanting: str) -> set[str]:
            step = live.go_on(set(wanting))
            for name, token in step.items():
                tokens[name].append(token)
            return set(step)

        with Paths(live) as paths:
            for i, name in enumerate(running):
                begin(live, name, PROMPT[:8], key=i)
            while len(tokens[running[0]]) < 4:
                go_on(*running)
            begin(live, late, PROMPT[:8], key=names.index(late))
            assert go_on(*running, late) == {*running, late}
            assert paths["waiting"] > 0
            assert paths["brief"] > 0
            # The batch is full: the last one waits for a place, and the others go on.
            begin(live, last, PROMPT[:8], key=names.index(last))
            before = dict(paths)
            for _ in range(3):
                assert go_on(*names) == {*running, late}
            # vLLM could admit nothing, so these steps need not be its own.
            assert paths == before | {"brief": before["brief"] + 3}
            live.close(running[0])
            assert go_on(*names[1:]) == set(names[1:])
            assert paths["waiting"] == before["waiting"] + 1
            while len(tokens[last]) < 8:
                assert go_on(*names[1:]) == set(names[1:])
        assert {name: right[name][: len(some)] for name, some in tokens.items()} == tokens

    do(work)


def test_memory_that_is_too_small_for_all_is_given_away_by_vllm(do):
    """A preempted sequence waits until another ends. Then its cache is computed again.

    A rollback while it waits takes effect.
    """

    def work(live):
        names = [f"m-{i}" for i in range(MAX_NUM_SEQS)]
        num, back = NUM_BLOCKS * BLOCK // 3 - len(PROMPT), 10
        right = {name: from_the_start(live, PROMPT, num, key=i) for i, name in enumerate(names)}
        live._core.reset_prefix_cache()
        tokens: dict[str, list[int]] = {name: [] for name in names}
        lost = ""
        with Paths(live) as paths:
            for i, name in enumerate(names):
                begin(live, name, PROMPT, key=i)
            wanting = set(names)
            while wanting:
                for name, token in live.go_on(wanting).items():
                    tokens[name].append(token)
                    if len(tokens[name]) == num:
                        wanting.remove(name)
                        live.close(name)
                requests = live._scheduler.requests
                if not lost and (gone := [n for n in wanting if requests[n].num_preemptions]):
                    (lost,) = gone
                    assert len(tokens[lost]) > back
                    live.set_back(lost, len(PROMPT) + back, right[lost][back : back + 2])
                    tokens[lost][back:] = right[lost][back : back + 2]
        assert tokens == right
        assert lost
        assert paths["too few blocks"] > 0
        assert paths["brief"] > num // 2

    do(work)


def test_more_new_tokens_than_a_step_takes_are_computed_in_several(do):
    def work(live):
        right = from_the_start(live, PROMPT[:8], 120)
        live._core.reset_prefix_cache()
        with Paths(live) as paths:
            begin(live, "a", PROMPT[:8])
            assert drawn_by_all(live, ["a"], 4)["a"] == right[:4]
            # The verifier is ahead by the tokens of two steps.
            live.set_back("a", 8 + 4, right[4 : 4 + 2 * STEP_TOKENS + 1])
            tokens = drawn_by_all(live, ["a"], 8)["a"]
        begins = 4 + 2 * STEP_TOKENS + 1
        assert tokens == right[begins : begins + 8]
        assert paths["other"] >= 2

    do(work)


def test_sequence_continues_to_the_context_limit(do):
    def work(live):
        num = LENGTH - len(PROMPT) - 1
        right = from_the_start(live, PROMPT, num)
        live._core.reset_prefix_cache()
        with Paths(live) as paths:
            begin(live, "a", PROMPT)
            tokens = drawn_by_all(live, ["a"], num)["a"]
        assert tokens == right
        assert paths["brief"] > num // 2

    do(work)


def test_drafts_of_a_drafter_without_room_for_all_are_right(do):
    """The drafter has too few places and too little memory for all its streams.

    It sends the drafts that it would send for each request alone. Streams that it gives up get no
    drafts.
    """

    def work(live):
        num, names = 100, [f"s-{i}" for i in range(3 * MAX_NUM_SEQS)]
        right = {n: from_the_start(live, PROMPT[:8], num, key=i) for i, n in enumerate(names)}
        live._core.reset_prefix_cache()
        drafter = Drafter(live)
        told = drafter.told
        opened = [
            Opened(name, PROMPT[:8], i, window=4, coupled=False, max_tokens=8 + num)
            for i, name in enumerate(names)
        ]
        drafter._receive(b"one", encode(Feedback(opened=opened)))
        done, rounds = dict.fromkeys(names, 0), 0
        with Paths(live) as paths:
            while drafter._wanting and rounds < 60 * num:
                rounds += 1
                drafter._draft()
                ahead = Counter()
                for one in told:
                    ahead[one.id] = max(ahead[one.id], one.start + 1 - 8)
                verified = []
                for _, id in list(drafter._streams):
                    # Sometimes the drafter is ahead, sometimes behind.
                    step = right[id][done[id] : done[id] + 1 + rounds % 3]
                    if rounds % 2 and step and ahead[id] >= done[id]:
                        verified.append(Verified(id, 8 + done[id], step))
                        done[id] += len(step)
                drafter._receive(b"one", encode(Feedback(verified=verified)))
            drafter._end(list(drafter._streams))
        wrong = [one for one in told if one.token_ids != right[one.id][one.start - 8 :][:1]]
        assert not wrong, wrong[:3]
        assert len(told) > len(names) * 10
        gone = len(names) - len({id for id in done if done[id] >= num - 1})
        return dict(paths), gone

    paths, gone = do(work)
    assert paths["waiting"] > 0
    assert paths["brief"] > 0
    assert gone > 0
