"""On which engines and when a step's requests ran, and in which rows of the page to draw them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.accounting.step_requests import (
    DEFERRED,
    Stay,
    first_free_rows,
    step_moves,
    step_requests,
)
from refrain.schemas.rollout import RequestId, Split
from refrain.schemas.timeline import (
    Activity,
    MoveKind,
    MoveRecord,
    RecordedTimeline,
    Span,
    Timeline,
)

TRAIN = Split.TRAIN
times = st.floats(0.0, 100.0)
intervals = st.lists(st.tuples(times, st.floats(0.01, 50.0)).map(lambda s: (s[0], s[0] + s[1])))


def named(prompt: str) -> RequestId:
    return RequestId(TRAIN, 2, prompt, 0)


def row(prompt: str, engine: int, started_s: float, finished_s: float, **changes):
    """Return a row with times on the timeline's clock, which is 1000 s behind."""
    return {
        "prompt_key": prompt,
        "sample_index": 0,
        "engine": engine,
        "started_s": 1000.0 + started_s,
        "finished_s": 1000.0 + finished_s,
        "prompt_tokens": 10,
        "response_tokens": 50,
        "step_tokens": 50,
        "finish_reason": "stop",
        "drafter": "histospec",
        "num_draft_tokens": 40,
        "num_accepted_tokens": 30,
        "reward": 1.0,
        "waits": [],
        **changes,
    }


def move(prompt: str, kind: MoveKind, origin: int, target: int, at_s: float) -> MoveRecord:
    return MoveRecord(named(prompt), origin, target, kind, at_s, 20)


def requests_of(rows, *moves: MoveRecord):
    recorded = RecordedTimeline(Timeline(10.0, 40.0, (0, 1, 2), (), moves), 1000.0)
    return {request.id.prompt_key: request for request in step_requests(recorded, TRAIN, 2, rows)}


@given(intervals, st.sampled_from([0.0, 0.25, 5.0]))
def test_bars_in_one_row_never_overlap(intervals, grain_s) -> None:
    rows = first_free_rows(intervals, grain_s)
    for row in set(rows):
        own = sorted(interval for interval, at in zip(intervals, rows, strict=True) if at == row)
        for before, after in pairwise(own):
            assert before[1] <= after[0]


@given(intervals)
def test_rows_never_exceed_concurrent_bars(intervals) -> None:
    rows = first_free_rows(intervals)
    most = max((sum(a <= s < b for a, b in intervals) for s, _ in intervals), default=0)
    assert len(set(rows)) == most
    assert set(rows) == set(range(most))


def test_unmoved_request_has_one_stay_from_window_start() -> None:
    request = requests_of([row("a", 1, 12.0, 20.0)])["a"]
    assert request.stays == (Stay(1, 2.0, 10.0),)
    assert (request.num_passes, request.reward, request.engine) == (20, 1.0, 1)


def test_moved_request_starts_with_its_first_engine() -> None:
    rows = [row("a", 0, 12.0, 20.0), row("b", 1, 25.0, 30.0)]
    request = requests_of(rows, move("b", MoveKind.MIGRATED, 0, 1, 24.0))["b"]
    assert request.stays == (Stay(0, 2.0, 14.0), Stay(1, 14.0, 20.0))


def test_of_a_race_the_other_copy_lost_at_the_end() -> None:
    rows = [row("a", 0, 12.0, 20.0), row("b", 1, 24.0, 30.0), row("c", 0, 12.0, 30.0)]
    raced = [move(name, MoveKind.RACED, 0, 1, 24.0) for name in "bc"]
    found = requests_of(rows, *raced)
    assert found["b"].stays == (Stay(0, 2.0, 20.0, lost=True), Stay(1, 14.0, 20.0))
    assert found["c"].stays == (Stay(1, 14.0, 20.0, lost=True), Stay(0, 2.0, 20.0))


def test_deferred_request_ends_when_it_leaves() -> None:
    rows = [row("a", 0, 12.0, 20.0)]
    left = requests_of(rows, move("b", MoveKind.DEFERRED, 0, 2, 30.0))["b"]
    assert (left.stays, left.finish_reason) == ((Stay(0, 2.0, 20.0),), DEFERRED)
    assert (left.step_tokens, left.prompt_tokens) == (20, None)


def test_dead_engines_request_is_where_it_finished() -> None:
    rows = [row("a", 0, 12.0, 20.0), row("b", 2, 26.0, 30.0)]
    request = requests_of(rows, move("b", MoveKind.MIGRATED, 0, 1, 24.0))["b"]
    assert request.stays[-1] == Stay(2, 16.0, 20.0)


def test_request_before_window_counts_if_its_rollout_overlaps() -> None:
    spans = (
        Span(0, Activity.ROLLOUT, "train/2", 2.0, 12.0),
        Span(1, Activity.ROLLOUT, "train/1", 0.0),
    )
    recorded = RecordedTimeline(Timeline(10.0, 40.0, (0, 1), spans), 1000.0)
    rows = [row("a", 0, 2.0, 9.0), row("b", 1, 2.0, 9.0), row("c", 0, 0.5, 0.9)]
    (request,) = step_requests(recorded, TRAIN, 2, rows)
    assert request.stays == (Stay(0, -8.0, -1.0),)


def test_requests_of_other_windows_and_steps_are_excluded() -> None:
    assert requests_of([row("a", 0, 2.0, 9.0)]) == {}
    other = MoveRecord(RequestId(TRAIN, 3, "a", 0), 0, 1, MoveKind.DEFERRED, 20.0, 5)
    assert step_moves(Timeline(10.0, 40.0, (0,), (), (other,)), TRAIN, 2) == []


def test_waits_count_from_the_window() -> None:
    request = requests_of([row("a", 1, 12.0, 20.0, waits=[[1013.0, 1014.5], [1016.0, 1016.5]])])[
        "a"
    ]
    assert request.waits == ((3.0, 4.5), (6.0, 6.5))
