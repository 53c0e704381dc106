"""The grid of a profile is sparse, fits the KV cache, and has a curve for each batch size."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.latency.grid import (
    batches_up_to,
    decode_grid,
    draft_grid,
    num_draft_windows,
    shuffled,
    verify_grid,
)
from refrain.schemas.latency import PointKind

STEPS = 60


def test_about_ten_batch_sizes_and_a_few_lengths_of_each():
    grid = decode_grid(1, 256, 4096, 10**9, STEPS)
    assert sorted({p.batch for p in grid}) == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
    assert set(Counter(p.batch for p in grid).values()) == {7}
    assert max(p.prompt_tokens for p in grid) == 4096 - STEPS


def test_short_lengths_are_measured_where_they_are_not_anyway():
    short = {n: decode_grid(1, 2, n + STEPS, 10**9, STEPS) for n in (400, 10_000, 100_000)}
    of_one = {n: sorted({p.prompt_tokens for p in grid}) for n, grid in short.items()}
    assert of_one == {
        400: [20, 100, 200, 300, 400],
        10_000: [32, 128, 384, 500, 2500, 5000, 7500, 10_000],
        100_000: [32, 128, 384, 5000, 25_000, 50_000, 75_000, 100_000],
    }


@given(
    max_batch=st.integers(2, 1024),
    max_context=st.integers(STEPS + 5, 40_000),
    max_active_tokens=st.integers(2 * (STEPS + 5), 10**6),
)
def test_no_point_outgrows_the_cache_or_the_context(max_batch, max_context, max_active_tokens):
    grid = decode_grid(1, max_batch, max_context, max_active_tokens, STEPS)
    for point in grid:
        assert point.prompt_tokens + STEPS <= max_context
        assert point.batch * (point.prompt_tokens + STEPS) <= max_active_tokens
    # A curve needs two lengths, and a surface needs two curves.
    assert min(Counter(p.batch for p in grid).values()) >= 2
    assert len({p.batch for p in grid}) >= 2
    assert len(set(grid)) == len(grid)


def test_no_room_is_refused():
    with pytest.raises(ValueError, match=r"no room to measure .*context has 64 tokens.*Raise"):
        decode_grid(1, 256, 64, 10**6, STEPS)


@given(st.integers(2, 5000))
def test_batches_ascend_to_the_largest(max_batch):
    batches = batches_up_to(max_batch)
    assert batches[-1] == max_batch
    assert batches == sorted(set(batches))
    assert all(b <= 2 * a for a, b in pairwise(batches))


def test_verification_stays_within_one_engine_step():
    decode = decode_grid(1, 256, 384, 10**6, STEPS)
    grid = verify_grid(decode, (1, 4, 16), max_step_tokens=2048)
    assert {p.kind for p in grid} == {PointKind.VERIFY}
    assert all(p.batch * (p.window + 1) <= 2048 for p in grid)
    for window in (1, 4, 16):
        assert len({p.batch for p in grid if p.window == window}) >= 3
    assert max(p.batch for p in grid if p.window == 1) == 256
    assert max(p.batch for p in grid if p.window == 16) == 64


def test_a_window_without_two_batch_sizes_is_left_out():
    decode = decode_grid(1, 256, 384, 10**6, STEPS)
    assert {p.window for p in verify_grid(decode, (1, 32), max_step_tokens=40)} == {1}


def test_drafter_points_have_no_tp_degree():
    verify = verify_grid(decode_grid(4, 64, 384, 10**6, STEPS), (1, 8), max_step_tokens=2048)
    drafts = draft_grid(verify, "small")
    assert {(p.kind, p.drafter, p.tp_degree) for p in drafts} == {(PointKind.DRAFT, "small", 1)}
    shapes = [[(p.batch, p.prompt_tokens, p.window) for p in grid] for grid in (verify, drafts)]
    assert shapes[0] == shapes[1]


@given(
    steps=st.integers(2, 200),
    windows=st.sets(st.integers(1, 64), min_size=1),
    room=st.integers(13, 3000),
)
def test_a_draft_model_has_room_for_its_windows(steps, windows, room):
    longest = room + steps
    decode = decode_grid(1, 8, longest, 8 * longest, steps)
    for point in draft_grid(verify_grid(decode, sorted(windows), 10**6), "small"):
        num_tokens = num_draft_windows(steps, point.window) * point.window
        assert num_tokens >= 2 * point.window
        # `tasks.profile` starts the draft model's processes with this context length.
        assert point.prompt_tokens + num_tokens <= longest + 2 * max(windows)


def test_the_order_is_the_seeds():
    grid = decode_grid(1, 256, 384, 10**6, STEPS)
    assert shuffled(grid, 1) == shuffled(grid, 1) != shuffled(grid, 2)
    assert sorted(map(str, shuffled(grid, 1))) == sorted(map(str, grid))
