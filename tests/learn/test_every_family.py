"""The trainer computes each family of transformers right, with each feature, or refuses it."""

import os
import random

import pytest

from refrain.engines.learn.fidelity import check_fidelity
from tests.learn import every_family
from tests.learn.every_family import (
    FAMILIES,
    IMPOSSIBLE,
    REFUSED,
    RIGHT,
    features,
    tiny,
    verdict,
)

SEED = int(os.environ.get("REFRAIN_SEED", "1"))
KEEPS_STATE = {"recurrent_gemma"}
"""Families whose first forward is right, but which are refused: they keep state between calls."""
NUM_FAMILIES, NUM_FEATURES = 6, 3
"""Number of families, and of features of each, that the quick test draws."""


def test_a_few_families_are_right_or_refused() -> None:
    print(f"drawn by REFRAIN_SEED={SEED}")
    rng = random.Random(SEED)
    for family in rng.sample(FAMILIES, NUM_FAMILIES):
        if copy := tiny(family):
            drawn = list(features(copy.config))
            for _, changed in [("", {}), *rng.sample(drawn, min(NUM_FEATURES, len(drawn)))]:
                verdict(copy, changed)


def test_a_wrong_family_that_is_accepted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control. Doge makes its own mask, so the trainer computes it wrong. With the check
    switched off, `verdict` notices."""
    copy = tiny("doge")
    assert copy is not None
    assert verdict(copy, {})[0] == REFUSED
    monkeypatch.setattr(every_family, "check_fidelity", lambda *_: None)
    with pytest.raises(AssertionError, match=r"doge .*: wrong by .*, accepted"):
        verdict(copy, {})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_feature_of_a_family_is_right_or_refused(family: str) -> None:
    copy = tiny(family)
    if copy is None:
        pytest.skip("its defaults make no model that reads token ids alone")
    if verdict(copy, {})[0] == RIGHT and family not in KEEPS_STATE:
        assert check_fidelity(copy.config, copy.max_tokens) is None
    tried = [verdict(copy, changed)[0] for _, changed in features(copy.config)]
    assert set(tried) - {IMPOSSIBLE}


@pytest.mark.slow
def test_most_families_of_decoders_are_right() -> None:
    copies = [copy for copy in map(tiny, FAMILIES) if copy is not None]
    assert sum(verdict(copy, {})[0] == RIGHT for copy in copies) >= 40
