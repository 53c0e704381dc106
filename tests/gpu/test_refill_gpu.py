"""The kernels that draft from history on the device."""

from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
import torch

from refrain.schemas.drafting import DEVICE_INDEX_BYTES
from tests.gpu.needs import REHEARSAL, needs

NUM_ROWS, HISTORY_TOKENS, WINDOW = (6, 400, 5) if REHEARSAL else (256, 200_000, 16)
TIMES = 1 if REHEARSAL else 20


@needs("cuda", "triton", "numba", "vllm", seconds=60)
def test_drafts_are_those_of_the_definition(device: str, figures: Callable) -> None:
    """Each row has an index of its own and a shared one. Record the time of a step's drafts."""
    from refrain.engines.histospec.refill import refill
    from refrain.engines.inference.drafting.refill_kernel import refill_on_device
    from tests.inference.refill_cases import Histories

    random = np.random.default_rng(0)
    indexes = [_index(random) for _ in range(4)]
    histories = Histories(indexes)
    slots = np.array([[i % 3, 3] for i in range(NUM_ROWS)], np.int32)
    texts = np.zeros((NUM_ROWS, 64), np.int32)
    for i, text in enumerate(texts):
        known = indexes[slots[i, i % 2]].text
        start = int(random.integers(len(known) - 64))
        text[:] = np.maximum(known[start : start + 64], 1)
    num_tokens = np.full(NUM_ROWS, 64, np.int32)
    expected = np.zeros((NUM_ROWS, WINDOW), np.int32)
    windows = np.full(NUM_ROWS, WINDOW, np.int32)
    refill(histories.table.rows, slots, texts, num_tokens, windows, expected)
    given = [
        torch.from_numpy(each).to(device)
        for each in (slots, np.arange(NUM_ROWS), np.ones(NUM_ROWS, np.int32), texts, num_tokens)
    ]
    arena, rows = histories.arena.to(device), histories.rows.to(device)
    drafts = torch.zeros((NUM_ROWS, WINDOW), dtype=torch.int64, device=device)
    seconds = []
    for _ in range(TIMES + 1):
        seconds.append(_timed(lambda: refill_on_device(arena, rows, *given, drafts, 3, 7), device))
        assert drafts.cpu().numpy().tolist() == expected.tolist()
    assert np.count_nonzero(expected) > expected.size / 4
    figures(**{f"refill_{NUM_ROWS}_rows_us": 1e6 * median(seconds[-TIMES:])})


@needs("cuda", "triton", "numba", "vllm", seconds=30, rehearsed=False)
def test_indexes_on_the_card(device: str) -> None:
    """An index is copied to the card and found there, and its memory is given back."""
    from refrain.engines.inference.drafting.device_drafter import DeviceTable

    table, index = DeviceTable(torch.device(device)), _index(np.random.default_rng(1))
    loaded = table.load(index)
    assert loaded is not None
    text = loaded.on_device[: len(index.text)]
    assert torch.equal(text.cpu(), torch.from_numpy(np.array(index.text)))
    slot = table.add(loaded)
    at, order_at, num = table.on_device[slot].tolist()
    assert (order_at - at, num) == (len(index.text), len(index.text))
    assert table.base.data_ptr() + 4 * at == loaded.on_device.data_ptr()
    held = table._num_bytes
    table.remove(slot)
    del loaded, text
    assert 0 == table._num_bytes < held < DEVICE_INDEX_BYTES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "refrain.engines.inference.drafting.device_drafter.DEVICE_INDEX_BYTES", held - 1
        )
        assert table.load(index) is None


def _index(random: np.random.Generator):
    from refrain.engines.histospec.index import build_index

    vocabulary = 8 if REHEARSAL else 50_000
    response = random.integers(1, vocabulary, HISTORY_TOKENS // 8)
    # Responses that repeat each other, with some other tokens.
    responses = [np.where(random.random(len(response)) < 0.05, 1, response) for _ in range(8)]
    return build_index([1, 2, 3], responses, [0.0] * 8, max_draft=WINDOW)


def _timed(step: Callable[[], None], device: str) -> float:
    if device == "cpu":
        step()
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
