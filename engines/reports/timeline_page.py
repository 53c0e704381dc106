"""Write a step's timeline as one HTML file that needs no server and no network. Pure.

    timeline, requests, savings ─► page_data (JSON) ─► the template's script draws it

The script inserts data only as text and numbers, never as markup.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from refrain.engines.accounting.savings import saving_words
from refrain.engines.accounting.step_requests import StepRequest, first_free_rows
from refrain.schemas.step import EngineShare
from refrain.schemas.timeline import (
    Activity,
    MoveKind,
    MoveRecord,
    RecordedTimeline,
    Savings,
    Span,
    Timeline,
)

TEMPLATE = Path(__file__).with_name("timeline_page.html")
PLACEHOLDER = "/*DATA*/"
ACTIVITIES = {
    Activity.SYNC: "weight sync",
    Activity.RESTART: "restart",
    Activity.SWITCH: "GPUs change hands",
    Activity.PARKED: "parked: its GPUs are in another layout",
    Activity.TRAINING: "training, on the same GPUs",
}
"""Words for all activities except rollouts, which are named after their step."""
MOVES = {
    MoveKind.MIGRATED: "migrated",
    MoveKind.DEFERRED: "deferred to the next step",
    MoveKind.RACED: "raced on another engine too",
    MoveKind.RESHAPED: "with its GPUs to another TP degree",
}
NUM_SLOTS = 150
"""Time slots of the window. Moves of one kind and engine pair in a slot are drawn as one arrow."""
_GRAIN_SHARE = 1 / 400
"""Share of the window. Requests that begin this close together count as simultaneous when rows are
ordered."""
_DIGITS = 4
"""Number of decimals of seconds."""
_ESCAPES = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})
"""Escapes for characters that could end a script element or a line of a script."""

Gpus = Mapping[int, tuple[int, ...]]
"""GPUs of each engine, numbered across all nodes."""


def timeline_page(
    recorded: RecordedTimeline, requests: Sequence[StepRequest], gpus: Gpus, title: str
) -> str:
    """Return the file's content. Engines missing in `gpus` get the next free GPU numbers."""
    text = json.dumps(
        page_data(recorded, requests, gpus, title), ensure_ascii=False, separators=(",", ":")
    )
    before, after = TEMPLATE.read_text().split(PLACEHOLDER)
    return before + text.translate(_ESCAPES) + after


def page_data(
    recorded: RecordedTimeline, requests: Sequence[StepRequest], gpus: Gpus, title: str
) -> dict[str, Any]:
    """Return all data of the page. Times are in seconds since the window began."""
    timeline = recorded.timeline
    window_s = timeline.window_s
    gpus = _all_placed(timeline, gpus)
    bars = clip_spans(timeline)
    rollout_s = defaultdict[str, float](float)
    for bar in bars:
        if bar.activity is Activity.ROLLOUT:
            rollout_s[bar.label] += bar.end_s - bar.start_s
    steps = list(rollout_s)
    return {
        "title": title,
        "window_s": round(window_s, _DIGITS),
        "bubble_share": round(timeline.bubble_share, _DIGITS),
        "engines": [
            [engine, timeline.tp_degrees.get(engine, 1), list(gpus[engine])]
            for engine in timeline.engines
        ],
        "steps": [step.replace("/", " step ") or "a rollout" for step in steps],
        "main": steps.index(max(steps, key=rollout_s.__getitem__)) if steps else -1,
        "doing": {str(activity): words for activity, words in ACTIVITIES.items()},
        "spans": [
            [
                bar.engine,
                str(bar.activity),
                steps.index(bar.label) if bar.activity is Activity.ROLLOUT else -1,
                *_rounded(bar.start_s, bar.end_s),
            ]
            for bar in bars
        ],
        **_request_columns(requests, gpus, window_s),
        "moved": {str(kind): words for kind, words in MOVES.items()},
        "moves": [
            [str(first.kind), first.from_engine, first.to_engine, *_rounded(first.at_s), num]
            for first, num in join_moves(timeline).items()
        ],
        "shares": [found for share in recorded.shares if (found := _share(share))],
        "savings": _savings(recorded.savings),
    }


def clip_spans(timeline: Timeline) -> list[Span]:
    """Return the spans in order of time, cut at both ends of the window, in seconds since its
    start."""
    begin_s, clipped = timeline.start_s, []
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        start_s, end_s = max(span.start_s, begin_s), min(span.end_s, timeline.end_s)
        if end_s > start_s:
            clipped.append(replace(span, start_s=start_s - begin_s, end_s=end_s - begin_s))
    return clipped


def join_moves(timeline: Timeline) -> Mapping[MoveRecord, int]:
    """Return the arrows to draw, in order of time, with the number of moves that each stands for.
    An arrow is the first move of its time slot, kind and pair of engines."""
    slot_s = timeline.window_s / NUM_SLOTS or 1.0
    first: dict[tuple[int, int, int, MoveKind], MoveRecord] = {}
    arrows = Counter[MoveRecord]()
    for move in timeline.moves_in_order():
        key = (int(move.at_s / slot_s), move.from_engine, move.to_engine, move.kind)
        arrows[first.setdefault(key, move)] += 1
    return arrows


def _all_placed(timeline: Timeline, gpus: Gpus) -> dict[int, tuple[int, ...]]:
    placed = dict(gpus)
    for engine in timeline.engines:
        if engine not in placed:
            first = 1 + max((gpu for own in placed.values() for gpu in own), default=-1)
            placed[engine] = tuple(range(first, first + timeline.tp_degrees.get(engine, 1)))
    return placed


def _request_columns(
    requests: Sequence[StepRequest], gpus: Gpus, window_s: float
) -> dict[str, list[Any]]:
    """Return requests, their stays on engines and their waits. Names are stored once and referenced
    by index. A stay refers to its request, and ends with its row in the lane of its engine's first
    GPU. A wait refers to its stay."""
    prompts = {request.id.prompt_key: 0 for request in requests}
    words = {word: 0 for r in requests for word in (r.drafter, r.finish_reason)}
    for table in (prompts, words):
        table.update({name: index for index, name in enumerate(table)})
    lanes: dict[int, list[tuple[tuple[float, float], list[Any]]]] = defaultdict(list)
    stays: list[list[Any]] = []
    waits: list[list[Any]] = []
    for number, request in enumerate(requests):
        for stay in request.stays:
            start_s, end_s = max(0.0, stay.start_s), min(window_s, stay.end_s)
            if end_s > start_s:
                stays.append([stay.engine, number, *_rounded(start_s, end_s), int(stay.lost)])
                lanes[gpus[stay.engine][0]].append(((start_s, end_s), stays[-1]))
                own = [] if stay.lost else request.waits
                waits += [
                    [len(stays) - 1, *_rounded(*clipped)]
                    for wait in own
                    if (clipped := _clipped(wait, start_s, end_s))
                ]
    for lane in lanes.values():
        rows = first_free_rows([times_s for times_s, _ in lane], window_s * _GRAIN_SHARE)
        for (_, shown), row in zip(lane, rows, strict=True):
            shown.append(row)
    return {
        "prompts": list(prompts),
        "words": list(words),
        "requests": [_request_row(request, prompts, words) for request in requests],
        "stays": stays,
        "waits": waits,
    }


def _clipped(
    interval: tuple[float, float], start_s: float, end_s: float
) -> tuple[float, float] | None:
    """Return the part of an interval between two times, or None if there is none."""
    from_s, to_s = max(interval[0], start_s), min(interval[1], end_s)
    return (from_s, to_s) if from_s < to_s else None


def _request_row(
    request: StepRequest, prompts: Mapping[str, int], words: Mapping[str, int]
) -> list[Any]:
    return [
        prompts[request.id.prompt_key],
        request.id.sample_index,
        request.prompt_tokens,
        request.response_tokens,
        request.num_draft_tokens,
        request.num_accepted_tokens,
        words[request.drafter],
        words[request.finish_reason],
        None if request.reward is None else round(request.reward, _DIGITS),
    ]


def _share(share: EngineShare) -> list[float] | None:
    """Return [engine, drafting, verifying, decoding, rest] in seconds, or None if not measured."""
    if share.rest_s is None:
        return None
    drafting = share.drafting
    parts = (drafting.draft_s, drafting.verify_s, drafting.decode_s, share.rest_s)
    return [share.engine, *_rounded(*parts)]


def _savings(savings: Savings | None) -> dict[str, Any] | None:
    if savings is None:
        return None
    return {
        "measured_s": round(savings.measured_s, _DIGITS),
        "source": savings.source,
        "words": saving_words(savings),
        "each": [
            [str(saving.technique), *_rounded(saving.saved_s, saving.uncertainty_s), saving.clear]
            for saving in savings.each
        ],
    }


def _rounded(*seconds: float) -> list[float]:
    return [round(value, _DIGITS) for value in seconds]
