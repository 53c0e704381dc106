"""Timelines of engines in the format of trace-event viewers."""

from pathlib import Path

from refrain.engines.reports.trace_events import read_timelines, trace_events, write_timeline
from refrain.schemas.rollout import RequestId, Split
from refrain.schemas.timeline import (
    Activity,
    MoveKind,
    MoveRecord,
    RecordedTimeline,
    Span,
    Timeline,
)

MOVE = MoveRecord(RequestId(Split.TRAIN, 2, "p", 0), 0, 1, MoveKind.MIGRATED, 14.0, 33)
FIRST = RecordedTimeline(
    Timeline(
        10.0,
        15.0,
        (0, 1),
        (
            Span(0, Activity.SYNC, "train/1", 10.0, 10.5),
            Span(0, Activity.ROLLOUT, "train/1", 10.5, 13.0),
            Span(1, Activity.ROLLOUT, "train/2", 12.0),
        ),
        (MOVE,),
    ),
    clock_zero_s=1000.0,
)
SECOND = RecordedTimeline(
    Timeline(15.0, 19.0, (0, 1), (Span(1, Activity.ROLLOUT, "train/2", 12.0, 18.0),), (MOVE,)),
    clock_zero_s=1000.0,
)
ROLLOUT = {
    "name": "train step 1",
    "engine": 0,
    "started_s": 1010.5,
    "finished_s": 1012.0,
    "args": {"reward": 1.0},
    "waits": [],
}


def of_kind(events: dict, kind: str) -> list[dict]:
    return [event for event in events["traceEvents"] if event["ph"] == kind]


def test_each_span_appears_once_with_its_length() -> None:
    spans = of_kind(trace_events([FIRST, SECOND]), "X")
    assert [(s["pid"], s["name"], s["ts"], s["dur"]) for s in spans] == [
        (0, "sync train/1", 0, 500_000),
        (0, "rollout train/1", 500_000, 2_500_000),
        (1, "rollout train/2", 2_000_000, 6_000_000),
    ]


def test_open_span_ends_with_the_timeline() -> None:
    *_, last = of_kind(trace_events([FIRST]), "X")
    assert last["dur"] == 3_000_000


def test_a_move_is_one_arrow_from_engine_to_engine() -> None:
    events = trace_events([FIRST, SECOND])
    (mark,), (tail,), (head,) = (of_kind(events, kind) for kind in ("i", "s", "f"))
    assert (mark["name"], mark["args"]) == (
        "migrated",
        {"request": "train/2/p/0", "tokens": 33},
    )
    assert (tail["pid"], head["pid"], tail["id"]) == (0, 1, head["id"])
    assert tail["ts"] == head["ts"] == 4_000_000


def test_rollouts_lie_under_their_engine_at_the_time_of_day() -> None:
    events = trace_events([FIRST], [ROLLOUT])
    (begin,), (end,) = of_kind(events, "b"), of_kind(events, "e")
    assert (begin["pid"], begin["ts"], end["ts"]) == (0, 500_000, 2_000_000)
    assert begin["id"] == end["id"]
    assert begin["args"] == {"reward": 1.0}


def test_waits_lie_inside_their_rollout() -> None:
    waiting = ROLLOUT | {"waits": [(1010.75, 1011.0), (1011.5, 1011.75)]}
    events = [e for e in trace_events([FIRST], [waiting])["traceEvents"] if e["ph"] in "be"]
    assert [(e["ph"], e["ts"] / 1e6) for e in events] == [
        *(("b", 0.5), ("b", 0.75), ("e", 1.0), ("b", 1.5), ("e", 1.75), ("e", 2.0))
    ]
    assert len({(e["id"], e["cat"], e["pid"]) for e in events}) == 1
    assert len({e["name"] for e in events[1:-1]}) == 1


def test_engines_are_named() -> None:
    names = [e for e in of_kind(trace_events([FIRST]), "M") if e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in names] == [(0, "engine 0"), (1, "engine 1")]


def test_timelines_are_kept_and_read_in_order_of_time(tmp_path: Path) -> None:
    write_timeline(tmp_path, "train-00001", SECOND)
    write_timeline(tmp_path, "train-00001", FIRST)
    write_timeline(tmp_path, "train-00000", SECOND)
    assert read_timelines(tmp_path) == [FIRST, SECOND]
    assert read_timelines(tmp_path / "none") == []


def test_nothing_gives_no_events() -> None:
    assert trace_events([])["traceEvents"] == []
