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
from collections.abc import Callable, Container, Sequence
from itertools import chain
from typing import Any

import numpy as np

REPORT_S = 0.1
"""Seconds between reports of unfinished requests."""


class OutputBuffer:
    """Outputs (vLLM's `EngineCoreOutput`) that were not reported to the front end yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s = clock()
        self._outputs: dict[str, list[Any]] = defaultdict(list)
        """Outputs of each request, oldest first."""

    def outputs_after(self, outputs: Sequence[Any], streamed: Container[str]) -> list[Any]:
        """Add the outputs of a step. Return the outputs to report now, at most one per request.

        `streamed`: requests to report after each step.
        """
        for output in outputs:
            self._outputs[output.request_id].append(output)
        if (now_s := self._clock()) - self._told_s < REPORT_S:
            ids = [o.request_id for o in outputs if o.finished or o.request_id in streamed]
        else:
            ids, self._told_s = list(self._outputs), now_s
        return [merged(self._outputs.pop(id)) for id in ids]

    def forget(self, ids: Sequence[str]) -> None:
        """Drop the buffered outputs of removed requests."""
        for id in ids:
            self._outputs.pop(id, None)


def merged(outputs: Sequence[Any]) -> Any:
    """Merge consecutive outputs of one request into one."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return last
    last.new_token_ids = list(chain.from_iterable(output.new_token_ids for output in outputs))
    last.new_logprobs = _joined([o.new_logprobs for o in outputs if o.new_logprobs is not None])
    # These fields come with the first token only.
    last.prefill_stats = first.prefill_stats
    last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
    last.events = list(chain.from_iterable(output.events or () for output in outputs)) or None
    return last


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenate log-probabilities (vLLM's `LogprobsLists`). Return None if there are none."""
    if not parts:
        return None
    ids, logprobs, ranks = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return type(parts[0])(ids, logprobs, ranks)
