"""Outputs of vLLM's steps, held back until a request ends or some moments have passed.

    step ─► outputs ─► held by request ─┬─ it ends, or it is time ─► one message to the front end
                           ▲            └─ else: nothing
                           └── the next step's

vLLM sends every step's tokens to its front end, a process of its own, which takes each through a
detokenizer and lists of log-probabilities, and hands out whole responses alone. Told of a request
once, and every `REPORT_S` while it runs, neither process has much to do with a token.

What the front end knows of unfinished requests, hence progress, copies and what is withdrawn, is up
to `REPORT_S` old: tokens that it does not know of yet are drawn again, and are the same.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from itertools import chain
from typing import Any

import numpy as np

REPORT_S = 0.1
"""Seconds between reports of unfinished requests."""


class HeldOutputs:
    """Outputs of steps that were not told of yet, as vLLM's `EngineCoreOutput`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s = clock()
        self._outputs: dict[str, list[Any]] = defaultdict(list)
        """Those of each request, the oldest first."""

    def told_after(self, outputs: Sequence[Any], streamed: Container[str]) -> list[Any]:
        """Outputs that are told after a step that has put out these, at most one a request.

        `streamed`: requests that are told of after each step.
        """
        for output in outputs:
            self._outputs[output.request_id].append(output)
        if (now_s := self._clock()) - self._told_s < REPORT_S:
            ids = [o.request_id for o in outputs if o.finished or o.request_id in streamed]
        else:
            ids, self._told_s = list(self._outputs), now_s
        return [merged(self._outputs.pop(id)) for id in ids]

    def forget(self, ids: Sequence[str]) -> None:
        """Drop what was put out for requests that were taken out."""
        for id in ids:
            self._outputs.pop(id, None)


def merged(outputs: Sequence[Any]) -> Any:
    """One output of a request that says what these say in turn."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return last
    last.new_token_ids = list(chain.from_iterable(output.new_token_ids for output in outputs))
    last.new_logprobs = _joined([o.new_logprobs for o in outputs if o.new_logprobs is not None])
    # What comes with the first token.
    last.prefill_stats = first.prefill_stats
    last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
    last.events = list(chain.from_iterable(output.events or () for output in outputs)) or None
    return last


def _joined(parts: Sequence[Any]) -> Any:
    """Log-probabilities of tokens that follow each other, as vLLM's `LogprobsLists`."""
    if not parts:
        return None
    ids, logprobs, ranks = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return type(parts[0])(ids, logprobs, ranks)
