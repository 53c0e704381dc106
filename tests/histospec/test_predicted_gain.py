"""Predict how much drafting would save, from the answers of one step."""

import numpy as np
import pytest

from refrain.engines.histospec.predicted_gain import ResponseGroup, predict_gain
from refrain.schemas.drafting import DraftingConfig
from refrain.schemas.keys import sample_key

CONFIG = DraftingConfig()


def responses(spread: int, num: int = 8) -> ResponseGroup:
    """Return `num` answers of 60 tokens, of which `spread` are different."""
    rng = np.random.default_rng(spread)
    ways = rng.integers(0, 50_000, (spread, 60)).astype(np.int32)
    chosen = [ways[i % spread] for i in range(num)]
    keys = [sample_key(0, 0, "train", "p", i) for i in range(num)]
    return ResponseGroup(np.arange(9, dtype=np.int32), chosen, keys)


def test_answers_that_come_again_are_drafted_and_new_ones_are_not():
    same, new = predict_gain([responses(1)] * 6, CONFIG), predict_gain([responses(8)] * 6, CONFIG)
    assert same is not None
    assert new is not None
    assert same.where_cheap > 4.0
    assert same.where_cheap > same.where_dear > 1.0
    assert new.where_cheap == pytest.approx(1.0, abs=0.05)
    assert new.where_dear == pytest.approx(1.0, abs=0.05)


def test_single_responses_predict_no_gain():
    assert predict_gain([responses(1, num=1)], CONFIG) is None
    assert predict_gain([], CONFIG) is None
