"""The bench of the scheduler compares equal tokens, and notices unequal ones."""

from argparse import Namespace

import pytest
from rich.console import Console

from refrain.benchmarks import host, scheduling

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(host, "NUM_ROWS", (3,))
    monkeypatch.setattr(
        "refrain.engines.inference.engine.process.prepare_process", lambda **_: None
    )


def test_both_schedulers_draw_the_same_tokens():
    figures, rows = host.measure(Namespace(laps=2), Console())
    assert figures["identical"] == 1.0
    assert [(row["runner"], row["drafting"]) for row in rows] == [
        (1, False), (1, True), (2, False), (2, True),
    ]  # fmt: skip
    for name in ("host", "host_drafting", "host_v2", "host_v2_drafting"):
        assert figures[f"{name}_over_stock_3"] > 0


def test_other_tokens_are_noticed(monkeypatch):
    """Negative control: one side draws other tokens after a while."""
    draw, num = scheduling.token_of, iter(range(10**6))
    monkeypatch.setattr(scheduling, "token_of", lambda *given: draw(*given) + (next(num) > 300))
    figures, _ = host.measure(Namespace(laps=2), Console())
    assert figures["identical"] == 0.0
