"""The data and markup in the page of a step. Nothing here checks how the page looks."""

import json
import re
from dataclasses import replace

import pytest

from refrain.engines.accounting.step_requests import Stay, StepRequest
from refrain.engines.reports.timeline_page import page_data, timeline_page
from refrain.schemas.counts import DraftingCounts
from refrain.schemas.rollout import RequestId, Split
from refrain.schemas.step import EngineShare
from refrain.schemas.timeline import RecordedTimeline, Saving, Savings, Technique, Timeline
from tests.reports.test_timeline import SWITCHED, TIMELINE

NASTY = "</script><img src=x onerror=alert(1)>&\u2028`${1}` /*DATA*/"
POOL = {0: (0,), 1: (1,), 2: (0, 1)}


def request(key: str, engine: int, start_s: float, end_s: float) -> StepRequest:
    id = RequestId(Split.TRAIN, 1, key, 0)
    return StepRequest(id, (Stay(engine, start_s, end_s),), "stop", 9, 9, 5, 4, 2, "small", 0.5)


def page(recorded, requests=(), gpus=POOL, title="train step 1") -> str:
    return timeline_page(recorded, requests, gpus, title)


def embedded(text: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found)


def test_data_is_escaped_in_the_page():
    text = page(RecordedTimeline(SWITCHED, 0.0), [request(NASTY, 0, 0.0, 5.0)], title=NASTY)
    plain = page(RecordedTimeline(SWITCHED, 0.0), [request("p", 0, 0.0, 5.0)])
    assert embedded(text)["prompts"] == [NASTY]
    assert embedded(text)["title"] == NASTY
    for tag in ("<img", "<script", "</script", "\u2028"):
        assert text.count(tag) == plain.count(tag)


def test_the_script_makes_no_markup_and_the_page_asks_no_network():
    text = page(RecordedTimeline(SWITCHED, 0.0))
    assert "default-src 'none'" in text
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text
    addresses = set(re.findall(r"https?://[^\"'\s]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}


def test_a_thousand_requests_are_a_small_file():
    prompts = [f"{number:064x}" for number in range(1000)]
    many = [request(key, n % 3, 0.0123, 5.0 + n / 100) for n, key in enumerate(prompts)]
    assert len(page(RecordedTimeline(SWITCHED, 0.0), many).encode()) < 300_000


def test_requests_are_clipped_to_window_and_lane():
    """Engines 0 and 2 share GPU 0."""
    some = [
        request("a", 0, -1.0, 10.0),
        request("b", 0, 0.0, 8.0),
        request("c", 2, 7.0, 18.0),
        request("d", 1, 0.0, 30.0),
        request("e", 1, -5.0, -1.0),
    ]
    stays = page_data(RecordedTimeline(SWITCHED, 0.0), some, POOL, "")["stays"]
    assert [(engine, number, start, end) for engine, number, start, end, *_ in stays] == [
        (0, 0, 0.0, 10.0),
        (0, 1, 0.0, 8.0),
        (2, 2, 7.0, 18.0),
        (1, 3, 0.0, 20.0),
    ]
    rows = [row for *_, row in stays]
    assert sorted(rows[:2]) == [0, 1]
    assert rows[2:] == [2, 0]


def test_engines_without_a_place_get_gpus_of_their_own():
    engines = page_data(RecordedTimeline(TIMELINE, 0.0), [], {}, "")["engines"]
    assert engines == [[0, 1, [0]], [1, 1, [1]], [7, 1, [2]]]
    engines = page_data(RecordedTimeline(SWITCHED, 0.0), [], {0: (5,)}, "")["engines"]
    assert engines == [[0, 1, [5]], [1, 1, [6]], [2, 2, [7, 8]]]


def test_spans_moves_shares_and_savings_are_there():
    measured = EngineShare(
        engine=0,
        num_rollouts=1,
        num_tokens=1,
        busy_s=10.0,
        drafting=DraftingCounts(draft_s=1.0, decode_s=3.0, verify_s=4.0),
    )
    other = EngineShare(engine=1, num_rollouts=1, num_tokens=1, busy_s=10.0)
    savings = Savings(7.0, 6.0, "x", (Saving(Technique.SWITCHING, 3.0, 1.0),))
    recorded = RecordedTimeline(SWITCHED, 0.0, (measured, other), savings)
    data = page_data(recorded, [], POOL, "")
    assert data["spans"].count([2, "switch", -1, 10.0, 11.0]) == 1
    assert [data["steps"][step] for _, doing, step, *_ in data["spans"] if doing == "rollout"] == [
        "train step 1"
    ] * 3
    assert data["moves"] == [["reshaped", 0, 2, 10.0, 1]]
    assert data["shares"] == [[0, 1.0, 4.0, 3.0, 2.0]], "must omit the engine without times"
    assert data["savings"]["each"] == [["switching", 3.0, 1.0, True]]
    assert page_data(RecordedTimeline(SWITCHED, 0.0), [], POOL, "")["savings"] is None
    assert data["bubble_share"] == pytest.approx(6 / 40)


@pytest.mark.parametrize("end_s", [5.0, 6.0])
def test_a_window_of_no_time_or_without_anything_has_a_page(end_s):
    data = embedded(page(RecordedTimeline(Timeline(5.0, end_s, (3,), ()), 0.0)))
    assert (data["steps"], data["main"], data["spans"]) == ([], -1, [])


def test_the_step_with_most_rollout_time_is_the_main_one():
    data = page_data(RecordedTimeline(TIMELINE, 0.0), [], {}, "")
    assert data["steps"] == ["train step 1", "train step 2", "train step 3"]
    assert data["main"] == 1


def test_waits_are_cut_at_the_ends_of_stays_and_of_the_window():
    """Request a moves from engine 0 to 1 while it waits. Its copy on engine 2 has no known wait."""
    stays = (Stay(0, -2.0, 5.0), Stay(2, 4.0, 30.0, lost=True), Stay(1, 5.0, 30.0))
    moved = replace(request("a", 1, 0.0, 0.0), stays=stays)
    moved = replace(moved, waits=((-1.0, 1.0), (4.0, 6.0), (19.0, 25.0)))
    data = page_data(RecordedTimeline(SWITCHED, 0.0), [moved], POOL, "")
    assert [stay[0] for stay in data["stays"]] == [0, 2, 1]
    assert data["waits"] == [
        [0, 0.0, 1.0],
        [0, 4.0, 5.0],
        [2, 5.0, 6.0],
        [2, 19.0, 20.0],
    ]
    plain = page_data(RecordedTimeline(SWITCHED, 0.0), [request("a", 0, 0.0, 5.0)], POOL, "")
    assert plain["waits"] == []
