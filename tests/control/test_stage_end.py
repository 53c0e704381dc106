"""The end that a running stage shows is the controller's forecast. It counts down, costs one
forecast a second at most, and is unknown rather than wrong."""

from collections import defaultdict
from dataclasses import replace

import pytest

from refrain.engines.control.outlook import Outlook
from refrain.engines.control.stage_end import EVERY_S, MAX_REQUESTS, StageEnd
from refrain.engines.control.state import Forecaster
from refrain.engines.pat.remaining import FromHistory, Maximum
from refrain.engines.rollout.moves import RolloutView
from refrain.schemas.rollout import LengthHistory
from tests.control.scenes import MACHINE, MAX_TOKENS, view_of

TOKENS = {0: {1: 200, 2: 700}, 1: {3: 100}}


def outlook(remaining=None) -> Outlook:
    known = {f"p{i}": LengthHistory(1000.0 * i, 1500 * i, 1000.0 * i) for i in range(1, 4)}
    remaining = remaining or FromHistory(known, MAX_TOKENS, group_size=4)
    return Outlook(Forecaster(MACHINE), remaining, defaultdict(lambda: 100))


def all_of(tokens, elapsed_s=0.0, num_finished=0) -> RolloutView:
    """Return a view in which engines have all unfinished requests."""
    num = len({i for of in tokens.values() for i in of}) + num_finished
    view = view_of(tokens, elapsed_s=elapsed_s)
    return replace(view, num_finished=num_finished, num_rollouts=num)


def test_it_is_the_forecast_of_the_last_request():
    state = outlook().forecast(all_of(TOKENS))
    left_s = StageEnd(outlook()).left_s(all_of(TOKENS))
    assert left_s == state.end_s == max(state.engine_end_s(0), state.engine_end_s(1)) > 1.0


def test_between_two_forecasts_it_counts_down():
    looks, end = [], StageEnd(outlook())
    forecast = end.outlook.forecast
    end.outlook.forecast = lambda view: looks.append(view.elapsed_s) or forecast(view)
    first_s = end.left_s(all_of(TOKENS, 2.0))
    assert end.left_s(all_of(TOKENS, 2.25)) == pytest.approx(first_s - 0.25)
    assert end.left_s(all_of(TOKENS, 2.0 + EVERY_S)) == pytest.approx(first_s)
    assert looks == [2.0, 2.0 + EVERY_S]
    assert end.left_s(all_of({0: {}, 1: {}}, 9.0, num_finished=3)) == 0.0


def test_it_never_falls_below_zero():
    end = StageEnd(outlook())
    left_s = end.left_s(all_of({0: {1: MAX_TOKENS - 1}}))
    assert 0.0 < left_s < EVERY_S / 2
    assert end.left_s(all_of({0: {1: MAX_TOKENS - 1}}, EVERY_S / 2)) == 0.0


def test_a_raced_request_counts_once():
    assert StageEnd(outlook()).left_s(all_of({0: {1: 200}, 1: {1: 100}})) is not None


@pytest.mark.parametrize(
    ("end", "view"),
    [
        (StageEnd(outlook(Maximum(MAX_TOKENS))), all_of(TOKENS)),
        (StageEnd(outlook()), replace(all_of(TOKENS), num_rollouts=4)),
        (StageEnd(outlook()), all_of({0: dict.fromkeys(range(MAX_REQUESTS + 1), 1)})),
    ],
    ids=["unknown lengths", "requests at an earlier stage", "too many requests"],
)
def test_what_cannot_be_told_is_not_told(end: StageEnd, view: RolloutView):
    assert end.left_s(view) is None
    enough = all_of({0: dict.fromkeys(range(MAX_REQUESTS), 1)})
    assert StageEnd(outlook()).left_s(enough) is not None
