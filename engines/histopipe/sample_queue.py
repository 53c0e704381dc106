"""One queue of samples: an engine takes the next when it has room. Pure.

    waiting, longest expected first   | 16K 16K 9K ............... 300 200 |
    engine 0                            16K 16K               the step's end in time: few beside it
    engine 1                                    9K 8K 8K ..
    engine 9                                                700 650 .. 200     as many as pay

An engine has room for a sample if, with it,

- its longest request still ends before the step should end (`step_end`),
- its KV cache holds the tokens that its requests will have, and
- it has a place for one more (`max_num_seqs`).

Expected lengths come from history and from siblings (`group_lengths`). An empty engine takes the
longest waiting sample, then the longest that it has room for. It fills several places at once,
because a prefill holds up the whole batch.

A sample prefers the engine that has its prefix. The engine may take a sibling of its requests
before a longer sample if the prefill saved takes longer than the difference in length.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from engines.histopipe.group_lengths import GroupLengths
from engines.histopipe.step_end import Pace, TokenTimes
from engines.latency.interface import Latency
from engines.rollout.moves import EngineView, Migrate, RolloutView, Start
from schemas.rollout import RequestId, RolloutRequest

DELAY = True
GATHER = 8
REFILL_SHARE = 1 / 16
"""Share of an engine's requests that must be free before it takes more."""
LATE_FACTOR = 1.25
"""An engine whose longest request will miss the step's end runs so many beside it that it takes so
much longer than alone."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What engines can take."""

    latency: Latency
    times: TokenTimes
    tp_degree: int
    max_num_seqs: int
    max_context_tokens: float
    """Tokens that an engine's KV cache holds."""


class _Waiting:
    """Groups with waiting samples, in order of expected length."""

    def __init__(self, requests: Mapping[RequestId, RolloutRequest], lengths: GroupLengths) -> None:
        self._lengths = lengths
        self._requests: dict[str, list[RolloutRequest]] = {}
        for request in reversed(list(requests.values())):
            self._requests.setdefault(request.id.prompt_key, []).append(request)
        self._at = {key: lengths.tokens(key) for key in self._requests}
        self._order = sorted((tokens, key) for key, tokens in self._at.items())

    def __len__(self) -> int:
        return len(self._order)

    def lengths(self):
        return np.repeat([t for t, _ in reversed(self._order)], [len(self._requests[k]) for _, k in reversed(self._order)])

    def refresh(self, prompt_key: str) -> None:
        """Move a group whose expected length has changed."""
        if prompt_key in self._requests:
            self._remove(prompt_key)
            self._at[prompt_key] = self._lengths.tokens(prompt_key)
            insort(self._order, (self._at[prompt_key], prompt_key))

    def longest(self, limit: float) -> tuple[float, str] | None:
        """Return the longest group of at most so many expected tokens."""
        place = bisect_left(self._order, (limit, "\U0010ffff"))
        return self._order[place - 1] if place else None

    def expected(self, prompt_key: str) -> float | None:
        """Return the expected tokens of a waiting sample. None if the group has none."""
        return self._at[prompt_key] if prompt_key in self._requests else None

    def pop(self, prompt_key: str) -> RolloutRequest:
        """Take a sample out of the queue."""
        group = self._requests[prompt_key]
        request = group.pop()
        if not group:
            self._remove(prompt_key)
            del self._requests[prompt_key]
        return request

    def _remove(self, prompt_key: str) -> None:
        del self._order[bisect_left(self._order, (self._at[prompt_key], prompt_key))]


class _Load:
    """Requests of one engine, by forecast."""

    def __init__(self, view: EngineView, lengths: GroupLengths, prompts: Mapping[str, int]) -> None:
        self.engine = view.engine
        self.ids = list(view.progress)
        self.groups = Counter(id.prompt_key for id in view.progress)
        self.remaining = [
            lengths.remaining(id.prompt_key, num) for id, num in view.progress.items()
        ]
        self.context = [prompts[id.prompt_key] + num for id, num in view.progress.items()]
        self.longest = max(self.remaining, default=0.0)

    def __len__(self) -> int:
        return len(self.remaining)

    def add(self, prompt_key: str, context: int, remaining: float) -> None:
        self.groups[prompt_key] += 1
        self.remaining.append(remaining)
        self.context.append(context)
        self.longest = max(self.longest, remaining)

    def context_each(self) -> float:
        """Return the mean context of a request, halfway to its end."""
        return float(np.mean(self.context) + np.mean(self.remaining) / 2) if self.context else 0.0


def peak_tokens(context: Sequence[float], remaining: Sequence[float]) -> float:
    """Return the most tokens that requests will have together if each gains one at a time."""
    order = np.argsort(remaining)
    to_come = np.asarray(remaining, dtype=float)[order]
    from_here = np.cumsum(np.asarray(context, dtype=float)[order][::-1])[::-1]
    return float((from_here + to_come * np.arange(len(order), 0, -1)).max(initial=0.0))


class SampleQueue:
    """The policy of one step."""

    def __init__(self, lengths: GroupLengths, limits: EngineLimits, pace: Pace) -> None:
        """`end_s`: when the step should end, in seconds after it begins (`step_end`)."""
        self._lengths = lengths
        self._limits = limits
        self._pace = pace
        self._end_s = None
        self._waiting: _Waiting | None = None
        self._num_waiting = 0
        self._prompts: dict[str, int] = {}
        """Prompt tokens by key."""
        self._num_finished = 0
        self._seen: dict[int, EngineView] = {}
        self._next_s = -np.inf
        self._gathered_s = -np.inf

    def _plan(self, view: RolloutView, waiting: _Waiting) -> None:
        now_s = view.now_s
        prompt_tokens = float(np.mean(list(self._prompts.values())))
        self._rollout_s = self._pace.rollout_s(waiting.lengths(), prompt_tokens)
        self._ends = {}
        self._next_s = np.inf

    def decide(self, view: RolloutView) -> Sequence[Start | Migrate]:
        self._learn(view)
        waiting = self._queue(view)
        if len(waiting) and view.now_s >= self._next_s:
            self._plan(view, waiting)
        moves: list[Start] = []
        loads = []
        for engine in view.engines:
            if self._seen.get(engine.engine) is not engine:
                self._seen[engine.engine] = engine
                loads.append(_Load(engine, self._lengths, self._prompts))
        # Those with the fewest requests first: they take the longest.
        for load in sorted(loads, key=lambda load: (len(load), load.engine)):
            taken = self._take(load, waiting, view.now_s)
            moves += [Start(request.id, load.engine) for request in taken]
        self._num_waiting -= len(moves)
        if GATHER and not len(waiting) and view.now_s >= self._gathered_s + 1.0:
            self._gathered_s = view.now_s
            return [*moves, *self._relieve(view)]
        return moves

    def _to_come(self, view: RolloutView, waiting: _Waiting) -> np.ndarray:
        """Return the tokens to come of each running and waiting request, the most first."""
        running = [
            self._lengths.remaining(id.prompt_key, num)
            for engine in view.engines
            for id, num in engine.progress.items()
        ]
        return np.sort(np.concatenate((waiting.lengths(), running)))[::-1]

    def _relieve(self, view: RolloutView) -> list[Migrate]:
        """Return moves of the requests that would end last to engines that have none."""
        idle = [engine.engine for engine in view.engines if not engine.progress]
        if not idle:
            return []
        loads = [_Load(e, self._lengths, self._prompts) for e in view.engines if e.progress]
        loads.sort(key=self._seconds, reverse=True)
        moves: list[Migrate] = []
        for load in loads:
            if not idle:
                break
            ids = self._worth_moving(load)
            if ids:
                target = idle.pop()
                moves += [Migrate(id, target) for id in ids]
        return moves

    def _seconds(self, load: _Load) -> float:
        return load.longest * self._limits.times.token_s(len(load), load.context_each())

    def _worth_moving(self, load: _Load) -> list[RequestId]:
        """Return the requests of the engine that would end so much earlier on an empty one that a
        prefill pays."""
        num = sum(remaining > load.longest / 2 for remaining in load.remaining)
        num = min(num, len(load) // 2)
        if not num:
            return []
        longest = sorted(range(len(load)), key=load.remaining.__getitem__, reverse=True)[:num]
        limits, context = self._limits, load.context_each()
        gain_s = limits.times.token_s(len(load), context) - limits.times.token_s(num, context)
        moved = [load.context[place] for place in longest]
        prefill_s = limits.latency.prefill_s(limits.tp_degree, num, float(np.mean(moved)))
        if gain_s * load.longest < 2 * prefill_s:
            return []
        return [load.ids[place] for place in longest]

    def _learn(self, view: RolloutView) -> None:
        """Take the lengths of finished siblings into account."""
        num_new = len(view.finished) - self._num_finished
        for id, num_tokens in islice(reversed(view.finished.items()), num_new):
            self._lengths.add(id.prompt_key, num_tokens)
            if self._waiting:
                self._waiting.refresh(id.prompt_key)
        self._num_finished = len(view.finished)

    def _queue(self, view: RolloutView) -> _Waiting:
        if self._waiting is None or self._num_waiting != len(view.waiting):
            self._waiting = _Waiting(view.waiting, self._lengths)
            self._num_waiting = len(view.waiting)
            self._prompts |= {
                id.prompt_key: len(r.prompt_token_ids) for id, r in view.waiting.items()
            }
        return self._waiting

    def _take(self, load: _Load, waiting: _Waiting, now_s: float) -> list[RolloutRequest]:
        """Take what the engine has room for."""
        taken: list[RolloutRequest] = []
        if not len(load) or load.engine not in self._ends:
            self._ends[load.engine] = now_s + self._rollout_s
        if not self._refills(load, now_s):
            return taken
        while len(waiting) and (key := self._next(load, waiting, now_s)):
            request = waiting.pop(key)
            load.add(key, self._prompts[key], self._lengths.remaining(key, 0))
            taken.append(request)
        return taken

    def _refills(self, load: _Load, now_s: float) -> bool:
        """Whether enough places are free."""
        return len(load) + max(1.0, REFILL_SHARE * len(load)) <= self._places(load, now_s)

    def _places(self, load: _Load, now_s: float) -> float:
        """Return how many requests the engine may have so that its longest ends in time."""
        return self._batch(load, load.context_each(), now_s)

    def _batch(self, load: _Load, context: float, now_s: float) -> float:
        longest = load.longest
        limits = self._limits
        if not longest:
            return limits.max_num_seqs
        longest *= self.margin
        alone_s = limits.times.token_s(1, context)
        limit_s = max((self._ends[load.engine] - now_s) / longest, LATE_FACTOR * alone_s)
        return limits.times.batch_within(limit_s, context)

    def _next(self, load: _Load, waiting: _Waiting, now_s: float) -> str | None:
        """Return the group of the next sample, or None if there is no room."""
        if not len(load):
            return self._fitting(load, waiting, np.inf)
        if len(load) + 1 > self._places(load, now_s):
            return None
        times, context = self._limits.times, load.context_each()
        left_s = self._ends[load.engine] - now_s
        longest = max(load.longest, left_s / self.margin / times.token_s(len(load) + 1, context))
        return self._fitting(load, waiting, longest)

    def _fitting(self, load: _Load, waiting: _Waiting, limit: float) -> str | None:
        found = waiting.longest(limit)
        if found is None:
            return None
        tokens, key = found
        key = self._sibling(load, waiting, tokens) or key
        return key if self._holds(load, key, tokens) else None

    def _sibling(self, load: _Load, waiting: _Waiting, tokens: float) -> str | None:
        """Return a group whose prefix the engine has, if its samples are hardly shorter."""
        limits = self._limits
        token_s = limits.times.token_s(len(load) + 1, load.context_each())
        best: tuple[float, str] | None = None
        for key in load.groups:
            expected = waiting.expected(key)
            if expected is None or expected > tokens:
                continue
            saved_s = limits.latency.prefill_s(limits.tp_degree, 1, self._prompts[key])
            gain_s = saved_s - (tokens - expected) * token_s
            if gain_s > 0 and (best is None or gain_s > best[0]):
                best = gain_s, key
        return best and best[1]

    def _holds(self, load: _Load, prompt_key: str, tokens: float) -> bool:
        """Whether the KV cache holds one more sample of the group."""
        capacity = self._limits.max_context_tokens
        if capacity == np.inf or not len(load):
            return True
        context = [*load.context, self._prompts[prompt_key]]
        return peak_tokens(context, [*load.remaining, tokens]) <= capacity
