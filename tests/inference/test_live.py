"""Live sequences of a real draft model.

They may pause and be rolled back in any way. They continue as if they had never been wrong.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import DEMO

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = [3 + (i * i) % 33 for i in range(40)]
MAX_NUM_SEQS = 4
BLOCK = 32


class Probe:
    """A process with live sequences."""

    def __init__(self, **engine_args: Any) -> None:
        from refrain.engines.inference.drafting.live import LiveSequences
        from refrain.engines.inference.engine.process import prepare_process

        prepare_process(tp_degree=1)
        self.live = LiveSequences(
            {
                "model": str(DEMO / "drafter"),
                "dtype": "float32",
                "max_model_len": 256,
                "max_num_seqs": MAX_NUM_SEQS,
                "enforce_eager": True,
                "enable_prefix_caching": True,
                "disable_log_stats": True,
                "worker_extension_cls": "refrain.engines.inference.engine.worker.WorkerExtension",
                "block_size": BLOCK,
                "kv_cache_memory_bytes": 2**20,
            }
            | engine_args
        )

    def do(self, work: Callable[[Any], Any]) -> Any:
        return work(self.live)


@pytest.fixture(scope="module")
def do(ray_cluster) -> Iterator[Callable]:
    yield from doing(ray_cluster)


def doing(ray_cluster: Any, **engine_args: Any) -> Iterator[Callable]:
    """Yield a function that runs work on the live sequences of another process."""
    probe = ray_cluster.remote(num_cpus=0)(Probe).remote(**engine_args)
    yield lambda work: ray_cluster.get(probe.do.remote(work), timeout=300)
    ray_cluster.kill(probe)


def begin(live: Any, id: str, text: list[int], key: int = 5) -> None:
    live.open(id, text, temperature=1.0, extra_args={"sample_key": key})


def drawn(live: Any, id: str, num: int, others: tuple[str, ...] = ()) -> list[int]:
    """Return `num` tokens of a sequence. The others take part in some of the steps."""
    tokens: list[int] = []
    while len(tokens) < num:
        step = live.go_on({id, *others}) if len(tokens) % 3 else live.go_on({id})
        tokens += [token for name, token in step.items() if name == id]
    return tokens


def from_the_start(live: Any, text: list[int], num: int, key: int = 5) -> list[int]:
    """Return `num` tokens after a text, with an empty prefix cache."""
    assert live._core.reset_prefix_cache()
    name = f"fresh-{key}-{len(text)}"
    begin(live, name, text, key)
    tokens = drawn(live, name, num)
    live.close(name)
    return tokens


def test_rolled_back_sequence_continues_correctly(do):
    def work(live):
        right = from_the_start(live, PROMPT, 60)
        wrong = [*right[:20], 7, 8, 9]
        after_wrong = from_the_start(live, [*PROMPT, *wrong], 30)
        begin(live, "a", PROMPT)
        begin(live, "b", PROMPT, key=6)
        assert drawn(live, "a", 25, ("b",)) == right[:25]
        live.set_back("a", len(PROMPT) + 20, wrong[20:])
        assert drawn(live, "a", 30, ("b",)) == after_wrong
        live.set_back("a", len(PROMPT) + 4, right[4:5])
        drawn(live, "b", 5)
        assert drawn(live, "a", 40) == right[5:45]
        # The verifier is several tokens ahead. Then cut tokens without adding any.
        live.set_back("a", len(PROMPT) + 45, right[45:48])
        assert drawn(live, "a", 4) == right[48:52]
        live.set_back("a", len(PROMPT) + 50, [])
        assert drawn(live, "a", 6) == right[50:56]
        live.close("a")
        live.close("b")
        return len(set(right))

    assert do(work) > 5


def test_tokens_before_the_first_step_extend_the_text(do):
    """Tokens that arrive before the first step extend the sequence's text."""

    def work(live):
        right = from_the_start(live, PROMPT, 12)
        live._core.reset_prefix_cache()
        begin(live, "a", PROMPT)
        live.set_back("a", len(PROMPT), right[:2])
        live.set_back("a", len(PROMPT) + 2, right[2:3])
        assert drawn(live, "a", 4) == right[3:7]
        live.set_back("a", len(PROMPT) + 5, right[5:6])
        assert drawn(live, "a", 6) == right[6:12]
        live.close("a")

    do(work)


def test_more_sequences_than_a_step_has_room_for_all_go_on(do):
    def work(live):
        names = [f"many-{i}" for i in range(3 * MAX_NUM_SEQS)]
        right = {name: from_the_start(live, PROMPT, 12, key=i) for i, name in enumerate(names)}
        for i, name in enumerate(names):
            begin(live, name, PROMPT, key=i)
        tokens = {name: [] for name in names}
        for _ in range(200):
            wanting = {name for name in names if len(tokens[name]) < 12}
            if not wanting:
                break
            step = live.go_on(wanting)
            assert len(step) <= MAX_NUM_SEQS
            for name, token in step.items():
                tokens[name].append(token)
        for name in names:
            live.close(name)
        assert {name: some[:12] for name, some in tokens.items()} == right

    do(work)


def test_drafts_are_never_found_in_the_prefix_cache(do):
    """After a rollback, the cache would return keys and values of other tokens."""

    def work(live):
        pool = live._scheduler.kv_cache_manager.block_pool
        live._core.reset_prefix_cache()
        begin(live, "a", PROMPT)
        drafted = drawn(live, "a", 4 * BLOCK)
        text = [*PROMPT, *drafted]
        cached = len(pool.cached_block_hash_to_block)
        live.set_back("a", len(PROMPT) + 1, [7])
        drawn(live, "a", 4 * BLOCK)
        begin(live, "b", text[: 4 * BLOCK])
        after = drawn(live, "b", 20)
        live.close("a")
        live.close("b")
        assert after == from_the_start(live, text[: 4 * BLOCK], 20)
        return cached

    assert do(work) == len(PROMPT) // BLOCK


def test_paused_sequences_that_fill_memory_are_reported(do):
    """Paused sequences fill the memory: `CacheFull`. After one closes, others go on."""

    def work(live):
        from refrain.engines.inference.drafting.live import CacheFull

        blocks = live._scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        num = blocks * BLOCK // len(PROMPT) + 1
        opened = []
        try:
            for i in range(num):
                begin(live, f"r-{i}", [3 + i % 30, 3 + i // 30, *PROMPT[2:]], key=i)
                opened.append(f"r-{i}")
                drawn(live, opened[-1], 1)
        except CacheFull:
            live.close(opened.pop())
            assert drawn(live, opened[0], 1)
            return len(opened)
        finally:
            for name in opened:
                live.close(name)
        return 0

    assert do(work) > MAX_NUM_SEQS
