"""The model of SpecActor's drafters gives the figures that the paper prints."""

from collections import Counter
from statistics import fmean

import pytest

from refrain.benchmarks.papers.drafters import (
    DRAFTERS,
    LARGE,
    LATENCY,
    NGRAM,
    SMALL,
    draw_acceptances,
)
from refrain.benchmarks.papers.settings import SETTINGS
from refrain.benchmarks.papers.specactor import coupled_speedup
from refrain.benchmarks.papers.speculation_case import Case
from refrain.schemas.rollout import RequestId, Split

IDS = [RequestId(Split.TRAIN, 1, str(i), 0) for i in range(4000)]
(SETTING,) = SETTINGS["specactor"]


def test_best_drafter_varies_and_is_mostly_a_model():
    """Fig. 7 of the paper."""
    best = Counter(max(of, key=of.get) for of in draw_acceptances(IDS, 0).values())
    assert set(best) == set(DRAFTERS)
    assert best[LARGE] > best[SMALL] > best[NGRAM] > 0


def test_a_hard_request_is_hard_for_all():
    acceptances = sorted(draw_acceptances(IDS, 0).values(), key=lambda of: of[SMALL])
    hard, easy = acceptances[:1000], acceptances[-1000:]
    assert fmean(of[LARGE] for of in hard) + 0.05 < fmean(of[LARGE] for of in easy)


def test_decoding_one_request_takes_less_than_13_ms():
    """Section 5.1 of the paper."""
    assert LATENCY.decode_s(4, 1, 1000.0) < 0.013


def test_coupled_speculation_costs_at_256_and_pays_for_one():
    """Section 3 and Fig. 6b of the paper: no speedup, or a slowdown, at 256 requests."""
    case = Case.draw(SETTING.spec, SETTING.layout, 200, 0)
    assert coupled_speedup(case, 256) < 1.1
    assert coupled_speedup(case, 1) > 1.2
    assert coupled_speedup(case, 256) < coupled_speedup(case, 64) < coupled_speedup(case, 1)


@pytest.mark.parametrize("window", [0, 1, 5])
def test_verifying_is_affine_in_the_batch(window):
    """Section 4.1 of the paper."""
    one, two, three = (LATENCY.verify_s(4, b, 1000.0, window) for b in (10, 20, 30))
    assert two - one == pytest.approx(three - two)
    assert two - one == pytest.approx(10 * (window + 1) * LATENCY.sequence_s)
