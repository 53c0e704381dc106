"""Draft windows: updating many rows at once equals updating each row alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.histospec.window import AIMD, Doubling, Fixed

POLICIES = [AIMD(), AIMD(start=3, step=5, cap=11), Doubling(), Doubling(3, 20), Fixed(6)]
VERIFICATIONS = st.lists(
    st.integers(0, 32).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=40
)


@given(VERIFICATIONS)
def test_aimd_is_the_papers(verifications):
    """ "Initialized to two tokens. When all speculated tokens are accepted, additively increases
    the window size by 2, until it meets the upper threshold (32). But when any token is rejected,
    it resets the size directly to 2." """
    policy, expected = AIMD(), 2
    windows = policy.first(1)
    for drafted, accepted in verifications:
        windows = policy.next(windows, np.array([drafted]), np.array([accepted]))
        if accepted < drafted:
            expected = 2
        elif drafted and expected < 32:
            expected += 2
        assert windows.tolist() == [expected]


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
def test_rows_do_not_touch_and_windows_stay_in_bounds(policy, data):
    runs = [data.draw(VERIFICATIONS) for _ in range(3)]
    together = policy.first(3)
    alone = [policy.first(1) for _ in runs]
    for step in range(max(map(len, runs))):
        pairs = [run[step] if step < len(run) else (0, 0) for run in runs]
        drafted, accepted = np.array(pairs).T
        together = policy.next(together, drafted, accepted)
        for i, pair in enumerate(pairs):
            alone[i] = policy.next(alone[i], *np.array(pair)[:, None])
        assert together.dtype == np.int32
        assert together.tolist() == [int(w[0]) for w in alone]
        assert (together >= 1).all()
        assert (together <= policy.cap).all()


def test_doubling():
    policy = Doubling()
    windows = policy.first(1)
    seen = []
    for accepted in (True, True, True, True, True, False, False):
        windows = policy.next(windows, windows, windows if accepted else windows - 1)
        seen += windows.tolist()
    assert seen == [4, 8, 16, 32, 32, 16, 8]
