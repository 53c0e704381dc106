"""The rollout bench compares the predicted savings of drafts with the measured ones."""

import pytest

from refrain.benchmarks.rollout import _saved_figures


def lap(engine: str, epoch: int, seconds: float, saved_s: float = 0.0, group: int = 0) -> dict:
    drafted = 100 if saved_s else 0
    values = {"engine": engine, "epoch": epoch, "seconds": seconds, "saved_s": saved_s}
    return values | {"group": group, "num_draft_tokens": drafted}


def test_epoch_farthest_from_one_is_reported():
    rows = [
        lap("on", 1, 3.0),
        lap("off", 1, 2.0),
        *(lap("on", 2, 2.0, saved_s) for saved_s in (0.8, 0.9, 7.0)),
        *(lap("off", 2, 3.0) for _ in range(2)),
        *(lap("on", 5, 2.0, 1.6), lap("off", 5, 4.0), lap("off", 5, 9.0, group=1)),
    ]
    figures = _saved_figures(rows, (1, 2, 5))
    name = "saved_predicted_over_measured"
    assert figures == pytest.approx({f"{name}_epoch_2": 0.9, f"{name}_epoch_5": 0.8, name: 0.8})


def test_epochs_without_drafts_are_not_reported():
    assert _saved_figures([lap("on", 1, 3.0), lap("off", 1, 2.0)], (1,)) == {}
