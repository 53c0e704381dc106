"""Where the time of a decoding step goes."""

from collections.abc import Callable
from statistics import median

import pytest

from tests.gpu.fleet import FEW, LAPS, MOST_FLIPS, NUM_ROWS, RESPONSE_TOKENS, SHORT_TOKENS, Fleet
from tests.gpu.needs import REHEARSAL, needs

SAMPLED = "off", "on", "v2", "v2_on", "v2_head"
"""Engines that tell what they do."""


@needs("cuda", "vllm", "transformers", "numba", seconds=300)
def test_all_engines_start(fleet: Fleet) -> None:
    """The tests after this one are without the engines that failed."""
    print(*fleet.failed.values(), sep="\n")
    assert not fleet.failed


@needs("cuda", "vllm", "transformers", "numba", seconds=120)
@pytest.mark.parametrize("num_rows", [FEW, NUM_ROWS])
def test_a_step(num_rows: int, fleet: Fleet, figures: Callable) -> None:
    """A step of each engine, without the start and the end of its requests."""
    names = [name for name in (*SAMPLED, "stock") if name in fleet]
    steps: dict[str, list[float]] = {name: [] for name in names}
    for lap in range(LAPS + 1):
        for name in names:
            long_s, short_s = (
                fleet[name].roll_out(fleet.requests(300 + lap, num)[:num_rows])[1]
                for num in (RESPONSE_TOKENS, SHORT_TOKENS)
            )
            steps[name].append((long_s - short_s) / (RESPONSE_TOKENS - SHORT_TOKENS))
    for name, laps in steps.items():
        figures(**{f"step_{name}_{num_rows}_rows_ms": 1e3 * median(laps[1:])})


@needs("cuda", "vllm", "transformers", "numba", seconds=20)
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("num_rows", [FEW, NUM_ROWS])
def test_where_a_step_goes(num_rows: int, name: str, fleet: Fleet, figures: Callable) -> None:
    """Shares of the engine's thread by what it does, sampled every few milliseconds.

    The share `waits` is the GPU's: the host has nothing to do.
    """
    if name not in fleet:
        pytest.skip("needs this engine")
    engine = fleet[name]
    engine.wait(engine.engine._llm.collective_rpc("start_sampling"))
    engine.roll_out(fleet.requests(400)[:num_rows])
    ((shares, stacks, full_graphs),) = engine.wait(
        engine.engine._llm.collective_rpc("take_samples")
    )
    assert shares
    print(*stacks, sep="\n")
    shares["with_full_graphs"] = full_graphs
    figures(**{f"share_{name}_{num_rows}_rows_{what}": share for what, share in shares.items()})


@needs("cuda", "vllm", "transformers", "numba", seconds=20, rehearsed=False)
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("num_rows", [FEW, NUM_ROWS])
def test_kernels_of_a_step(num_rows: int, name: str, fleet: Fleet, figures: Callable) -> None:
    """Kernel time per step, with the prefill counted in. `busy`: share of the wall clock."""
    if name not in fleet:
        pytest.skip("needs this engine")
    engine = fleet[name]
    engine.wait(engine.engine._llm.collective_rpc("start_kernels"))
    engine.roll_out(fleet.requests(400, SHORT_TOKENS)[:num_rows])
    ((seconds, rows),) = engine.wait(engine.engine._llm.collective_rpc("take_kernels"))
    for kernel, num, kernel_s in rows[:25]:
        print(
            f"{1e3 * kernel_s / SHORT_TOKENS:8.4f} ms {num / SHORT_TOKENS:8.2f} calls {kernel[:90]}"
        )
    total_s = sum(kernel_s for _, _, kernel_s in rows)
    assert total_s
    key = f"kernels_{name}_{num_rows}_rows"
    figures(**{f"{key}_ms": 1e3 * total_s / SHORT_TOKENS, f"{key}_busy": total_s / seconds})


@needs("cuda", "vllm", "transformers", seconds=20)
def test_flips(fleet: Fleet, figures: Callable) -> None:
    """Engines beside each other, and one engine twice: with random weights, rounding flips tokens.

    In a rehearsal, in float32, it flips none.
    """
    from tests.gpu.local_engine import parted

    requests = fleet.requests(500)[:FEW]
    expected, _ = fleet["off"].roll_out(requests)
    for name in SAMPLED:
        if name not in fleet:
            continue
        num_flips, num = parted(fleet[name].roll_out(requests)[0], expected)
        figures(**{f"flips_engine_{name}_per_million": 1e6 * num_flips / num})
        assert num_flips <= (0 if REHEARSAL else 2 * MOST_FLIPS * num)
