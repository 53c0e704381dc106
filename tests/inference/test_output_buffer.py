"""Buffered outputs are all reported, in order and in time, and nothing else is."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.inference.engine.output_buffer import REPORT_S, OutputBuffer


class Logprobs(NamedTuple):
    """Fake of vLLM's `LogprobsLists`."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


@dataclass
class Output:
    """Fake of vLLM's `EngineCoreOutput`, with the fields that we read."""

    request_id: str
    new_token_ids: list[int]
    finished: bool = False
    new_logprobs: Logprobs | None = None
    prefill_stats: str | None = None
    new_prompt_logprobs_tensors: str | None = None
    events: list[int] | None = None
    routed_experts: np.ndarray | None = None


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def output(id: str, tokens: list[int], **values: Any) -> Output:
    column = np.array(tokens, np.float32)[:, None]
    return Output(id, list(tokens), new_logprobs=Logprobs(column, -column, column[:, 0]), **values)


@st.composite
def steps_of_requests(draw: st.DrawFn) -> list[tuple[float, list[Output]]]:
    """Draw steps: the seconds that each takes, and its outputs."""
    num_left = {f"r{i}": draw(st.integers(1, 5)) for i in range(draw(st.integers(1, 4)))}
    steps, token = [], 0
    while num_left:
        outputs = []
        for id in draw(st.lists(st.sampled_from(sorted(num_left)), min_size=1, unique=True)):
            num = draw(st.integers(1, 3))
            num_left[id] -= 1
            ended = not num_left[id]
            outputs.append(output(id, list(range(token, token + num)), finished=ended))
            token += num
            if ended:
                del num_left[id]
        steps.append((draw(st.sampled_from([0.0, REPORT_S / 3, REPORT_S])), outputs))
    return steps


@given(steps_of_requests(), st.sets(st.sampled_from(["r0", "r1"])))
def test_every_token_is_reported_once_in_order(steps, streamed):
    put_out, told, ended = defaultdict(list), defaultdict(list), set()
    clock, last_report_s = Clock(), 0.0
    buffer = OutputBuffer(clock)
    for seconds, outputs in steps:
        clock.now_s += seconds
        for one in outputs:
            put_out[one.request_id] += one.new_token_ids
            ended |= {one.request_id} if one.finished else set()
        reports = buffer.outputs_after(outputs, streamed)
        assert len({one.request_id for one in reports}) == len(reports)
        for one in reports:
            told[one.request_id] += one.new_token_ids
            assert one.new_logprobs.logprobs[:, 0].tolist() == [-t for t in one.new_token_ids]
            assert one.new_logprobs.sampled_token_ranks.tolist() == one.new_token_ids
            assert one.finished == (one.request_id in ended)
        due = clock.now_s - last_report_s >= REPORT_S
        last_report_s = clock.now_s if due else last_report_s
        at_once = put_out.keys() if due else ended | streamed
        for id in at_once & put_out.keys():
            assert told[id] == put_out[id]
    assert told == put_out


def test_unfinished_requests_wait_for_the_next_report():
    """Unfinished requests are reported only every `REPORT_S`, finished ones at once."""
    clock = Clock()
    buffer = OutputBuffer(clock)
    for _ in range(2):
        assert buffer.outputs_after([output("a", [1]), output("b", [2])], ()) == []
        (one,) = buffer.outputs_after([output("a", [3], finished=True)], ())
        assert (one.request_id, one.new_token_ids) == ("a", [1, 3])
        clock.now_s += REPORT_S
        assert [told.request_id for told in buffer.outputs_after([], ())] == ["b"]


def test_fields_of_the_first_output_are_reported_last():
    """Fields of a request's first output are part of its merged output."""
    buffer = OutputBuffer(Clock())
    first = output("a", [1], prefill_stats="cached", events=[1])
    first.new_prompt_logprobs_tensors = "of the prompt"
    buffer.outputs_after([first], ())
    buffer.outputs_after([output("a", [2])], ())
    (one,) = buffer.outputs_after([output("a", [3], finished=True, events=[2])], ())
    assert one.finished
    assert (one.prefill_stats, one.new_prompt_logprobs_tensors) == ("cached", "of the prompt")
    assert one.events == [1, 2]


def test_withdrawn_request_is_not_reported():
    clock = Clock()
    buffer = OutputBuffer(clock)
    buffer.outputs_after([output("a", [1]), output("b", [2])], ())
    buffer.forget(["a", "unknown"])
    clock.now_s = REPORT_S
    (one,) = buffer.outputs_after([], ())
    assert one.request_id == "b"


def test_outputs_without_logprobs_stay_without():
    buffer = OutputBuffer(Clock())
    buffer.outputs_after([Output("a", [1])], ())
    (one,) = buffer.outputs_after([Output("a", [2], finished=True)], ())
    assert (one.new_token_ids, one.new_logprobs, one.events) == ([1, 2], None, None)
