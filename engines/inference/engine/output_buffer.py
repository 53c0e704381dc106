"""Buffer the outputs of vLLM's steps until a request ends or `REPORT_S` has passed.

    step ─► outputs ─► buffer by request ─┬─ request ended, or time is up ─► front end
                             ▲            └─ otherwise: wait
                             └── next step's outputs

vLLM's front end is a process of its own. vLLM sends it the tokens of every step, and it handles
each one (detokenizer, lists of log-probabilities), although we need whole responses only. With this
buffer, it gets one message when a request ends, and one every `REPORT_S` while the request runs.
Both processes save time for each token.

So the front end's view of unfinished requests is up to `REPORT_S` old. Progress, copied requests
and withdrawn requests are built from this view. Another engine that continues such a request draws
the missing tokens again, and they are the same.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

REPORT_S = 0.1
"""Seconds between reports of unfinished requests."""


@dataclass(slots=True)
class Report:
    """What was not reported yet of one request."""

    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Rows of the tokens' log-probabilities in the buffer. Empty if the request wants none."""
    experts: list[np.ndarray] = field(default_factory=list)
    """Experts of the positions that the tokens have added. Empty unless they are recorded."""
    events: list[Any] = field(default_factory=list)
    first: Any = None
    last: Any = None
    """First and last of vLLM's outputs (`EngineCoreOutput`)."""


class OutputBuffer:
    """Outputs of requests that were not reported to the front end yet.

    All log-probabilities lie one after the other, so that a report gathers them at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s = clock()
        self._reports: dict[str, Report] = defaultdict(Report)
        self._logprobs: list[Sequence[np.ndarray]] = []
        """Log-probabilities by step: the columns of vLLM's `LogprobsLists`."""
        self._num_rows = 0

    def report_of(self, id: str) -> Report:
        """Return the report of a request that goes on. Add its tokens and rows to it.

        It stays valid until the next call of `outputs_after`.
        """
        return self._reports[id]

    def add_logprobs(self, logprobs: Sequence[np.ndarray]) -> int:
        """Keep the log-probabilities of a step. Return the number of their first row."""
        first = self._num_rows
        self._logprobs.append(logprobs[:3])
        self._num_rows += len(logprobs[0])
        return first

    def outputs_after(self, outputs: Sequence[Any], streamed: Container[str]) -> list[Any]:
        """Add vLLM's outputs of a step. Return the outputs to report now, at most one per request.

        `streamed`: requests to report after each step.
        """
        for output in outputs:
            self._add(output)
        due = (now_s := self._clock()) - self._told_s >= REPORT_S
        if due:
            ids, self._told_s = list(self._reports), now_s
        else:
            ids = [o.request_id for o in outputs if o.finished or o.request_id in streamed]
        if not ids:
            return []
        merged = [self._merged(id, self._reports.pop(id)) for id in ids]
        if due:
            self._logprobs, self._num_rows = [], 0
        return merged

    def forget(self, ids: Iterable[str]) -> None:
        """Drop the buffered outputs of removed requests."""
        for id in ids:
            self._reports.pop(id, None)

    def _add(self, output: Any) -> None:
        report = self._reports[output.request_id]
        report.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            row = self.add_logprobs(output.new_logprobs)
            report.rows += range(row, row + len(output.new_token_ids))
        if output.routed_experts is not None:
            report.experts.append(output.routed_experts)
        report.events += output.events or ()
        report.first, report.last = report.first or output, output

    def _merged(self, id: str, report: Report) -> Any:
        """Return a report as one `EngineCoreOutput`."""
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.outputs import LogprobsLists

        merged = report.last or EngineCoreOutput(id, [])
        merged.new_token_ids = report.tokens
        if report.rows:
            ids, logprobs, ranks = (column[report.rows] for column in self._columns())
            merged.new_logprobs = LogprobsLists(ids, logprobs, ranks)
        if report.experts:
            merged.routed_experts = np.concatenate(report.experts)
        if report.first is not None:
            # These fields come with the first token only.
            merged.prefill_stats = report.first.prefill_stats
            merged.new_prompt_logprobs_tensors = report.first.new_prompt_logprobs_tensors
        merged.events = report.events or None
        return merged

    def _columns(self) -> Sequence[np.ndarray]:
        if len(self._logprobs) > 1:
            joined = [np.concatenate(columns) for columns in zip(*self._logprobs, strict=True)]
            self._logprobs = [joined]
        return self._logprobs[0]
