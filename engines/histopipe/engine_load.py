"""What waits in the queue of samples, and what engines have to do, by forecast. Pure."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from refrain.engines.histopipe.group_lengths import GroupLengths
from refrain.engines.rollout.moves import EngineView
from refrain.schemas.rollout import RequestId, RolloutRequest


class WaitingSamples:
    """Groups with waiting samples, in order of expected time.

    Times are in tokens that a running request gains meanwhile: those of the response, and those
    that others gain while it waits for its environment.
    """

    def __init__(
        self,
        requests: Mapping[RequestId, RolloutRequest],
        lengths: GroupLengths,
        tokens_per_s: float = 0.0,
    ) -> None:
        """`tokens_per_s`: tokens that a running request gains in a second."""
        self._lengths, self._tokens_per_s = lengths, tokens_per_s
        self._requests: dict[str, list[RolloutRequest]] = {}
        for request in reversed(list(requests.values())):
            self._requests.setdefault(request.id.prompt_key, []).append(request)
        self._at = {key: self._time(key) for key in self._requests}
        self._order = sorted((tokens, key) for key, tokens in self._at.items())

    def __len__(self) -> int:
        return len(self._order)

    def lengths(self) -> list[float]:
        """Return the expected tokens of every waiting sample."""
        return [self._lengths.tokens(key) for _, key in self._order for _ in self._requests[key]]

    def longest_wait_s(self) -> float:
        """Return the seconds in which a sample of the longest group waits for its environment."""
        return self._lengths.wait_s(self._order[-1][1]) if self._order else 0.0

    def refresh(self, prompt_key: str) -> None:
        """Move a group whose expected length has changed."""
        if prompt_key in self._requests:
            self._remove(prompt_key)
            self._at[prompt_key] = self._time(prompt_key)
            insort(self._order, (self._at[prompt_key], prompt_key))

    def longest(self, limit: float) -> tuple[float, str] | None:
        """Return the longest group of at most this expected time, and its time."""
        place = bisect_left(self._order, (limit, "\U0010ffff"))
        return self._order[place - 1] if place else None

    def expected(self, prompt_key: str) -> float | None:
        """Return the expected time of a waiting sample. None if the group has none."""
        return self._at[prompt_key] if prompt_key in self._requests else None

    def pop(self, prompt_key: str) -> RolloutRequest:
        """Take a sample out of the queue."""
        group = self._requests[prompt_key]
        request = group.pop()
        if not group:
            self._remove(prompt_key)
            del self._requests[prompt_key]
        return request

    def _time(self, prompt_key: str) -> float:
        lengths = self._lengths
        return lengths.tokens(prompt_key) + self._tokens_per_s * lengths.wait_s(prompt_key)

    def _remove(self, prompt_key: str) -> None:
        del self._order[bisect_left(self._order, (self._at[prompt_key], prompt_key))]


@dataclass(slots=True)
class StepLoad:
    """Requests of one step on an engine."""

    lengths: GroupLengths
    prompts: Mapping[str, int]
    """Prompt tokens by key."""
    end_s: float
    """When they should have ended."""
    carried: "StepLoad | None" = None
    """What is known of the step before, some of whose requests were deferred to this one."""
    longest: float = 0.0
    """Tokens to come of the longest, with a margin."""
    wait_s: float = 0.0
    """Longest time in which one waits for its environment, in seconds."""


class EngineLoad:
    """Requests of one engine, by forecast: those of its step first, then those of earlier steps."""

    def __init__(self, view: EngineView, step: StepLoad, earlier: Mapping[int, StepLoad]) -> None:
        """`step`: of its own; `earlier`: by number."""
        self.engine = view.engine
        self.ids = list(view.progress)
        self.step = step
        self._of_steps = (step, *earlier.values())
        self.groups = Counter(id.prompt_key for id in view.progress)
        self.remaining: list[float] = []
        """Tokens that each request has yet to sample."""
        self.context: list[float] = []
        self.rates: list[float] = []
        """Tokens by which each context grows for each sampled token."""
        for id, num_tokens in view.progress.items():
            self._add(step, id, num_tokens)
        for id, num_tokens in view.earlier.items():
            if (of := earlier.get(id.step)) is not None:
                self._add(of, id, num_tokens)

    def __len__(self) -> int:
        return len(self.remaining)

    def add(self, id: RequestId) -> None:
        """Add a request of its own step, without response tokens."""
        self.groups[id.prompt_key] += 1
        self._add(self.step, id, 0)

    def _add(self, step: StepLoad, id: RequestId, num_tokens: int) -> None:
        deferred = id.sample_index < 0
        known = (deferred and step.carried) or step
        self.remaining.append(known.lengths.remaining(id.prompt_key, num_tokens))
        rate = known.lengths.context_per_token(id.prompt_key)
        self.context.append(known.prompts.get(id.prompt_key, 0) + rate * num_tokens)
        self.rates.append(rate)
        most = known.lengths.most_remaining(id.prompt_key, num_tokens, deferred=deferred)
        step.longest = max(step.longest, most)
        step.wait_s = max(step.wait_s, known.lengths.wait_s(id.prompt_key))

    @property
    def longest(self) -> float:
        """Tokens to come of the longest request, with a margin."""
        return max(of.longest for of in self._of_steps)

    def token_s(self, now_s: float) -> float:
        """Return the seconds in which each request must gain a token for all to end in time."""
        return min((of.end_s - now_s) / of.longest for of in self._of_steps if of.longest)

    def context_each(self) -> float:
        """Return the mean context of a request, halfway to its end."""
        if not self.context:
            return 0.0
        to_come = np.multiply(self.remaining, self.rates)
        return float(np.mean(self.context) + np.mean(to_come) / 2)


def peak_tokens(
    context: Sequence[float], remaining: Sequence[float], rates: Sequence[float] | float = 1.0
) -> float:
    """Return the most tokens that requests will have together if each samples one at a time.
    `rates`: tokens by which the context of each grows then."""
    order = np.argsort(remaining)
    columns = np.broadcast_arrays(np.asarray(context, dtype=float), rates)
    from_here, growth = (np.cumsum(column[order][::-1])[::-1] for column in columns)
    to_come = np.asarray(remaining, dtype=float)[order]
    return float((from_here + to_come * growth).max(initial=0.0))
