"""Simulate continuous batching by jumps from one change of the batch to the next. Pure.

    waiting ─prefill─► running ─decode─► done
       ▲                  │ KV cache full: preempt the request that joined last, prefill it again
       └──────────────────┘

Prefill has priority, and decoding pauses for it. All waiting requests that fit join together, and
the prefill gives each one token. A request that arrives with its KV cache runs at once. A
conversation leaves the batch while it waits for its environment. When it returns, it goes before
the requests that wait, and only what it observed is prefilled.

With drafting, a step verifies drafts for every running request, and each request gains tokens at
its own rate (`engines.simulate.member`). `engines.simulate.costs` has the time of a step. When the
batch changes, `choose_drafting` is called again, and drafters' paces are set again.

Deviations from a real engine: prefill is not chunked. Samples of a group share no prefix. The KV
cache reserves no space for draft tokens that will be rejected. The host's time between steps
counts only if the latency model was measured with it. The KV cache of a conversation that waits for
its environment is never evicted, and takes no room.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from refrain.engines.latency.interface import Latency
from refrain.engines.simulate.costs import StepCosts
from refrain.engines.simulate.member import PARTS, SimulatedRequest
from refrain.engines.simulate.pace import Interval, SteadyBatch, Stretch, plan_stretches
from refrain.schemas.rollout import DraftSetting, RequestId

ROUNDING_S = 1e-9
"""Times that differ by less count as equal."""
_MAX_SETTLING = 16
"""Most iterations of setting the drafters' paces before a step."""

ChooseDrafting = Callable[[int, float], DraftSetting | None]
"""A function (running requests, their context tokens) -> draft setting. None: no drafting."""


class VirtualBatch:
    """The requests of one engine. `now_s` must not decrease from one call to the next."""

    def __init__(
        self,
        tp_degree: int,
        latency: Latency,
        max_num_seqs: int,
        max_context_tokens: int | None,
        choose_drafting: ChooseDrafting | None = None,
    ) -> None:
        self._tp_degree = tp_degree
        self._latency = latency
        self._costs = StepCosts(tp_degree, latency)
        self._max_num_seqs = max_num_seqs
        self._capacity = max_context_tokens or math.inf
        self._choose_drafting = choose_drafting
        self._free_s = 0.0
        self._steps = 0
        self._drafting: DraftSetting | None = None
        self._context = 0
        """Context of the running requests, in parts of a token (`PARTS`)."""
        self._growth = 0
        """Parts that a step adds to the context."""
        self._waiting: OrderedDict[RequestId, SimulatedRequest] = OrderedDict()
        self._joining: dict[RequestId, SimulatedRequest] = {}
        self._running: dict[RequestId, SimulatedRequest] = {}
        self._away: dict[RequestId, SimulatedRequest] = {}
        """Conversations that wait for their environment."""
        self._ends: list[tuple[int, int, SimulatedRequest]] = []
        self._num_joined = 0
        self._span: SteadyBatch | None = None
        self.finished: deque[SimulatedRequest] = deque()
        """Finished requests in order of `finished_s`. The engine removes those that it reports."""
        self.intervals: list[Interval] = []
        self.num_preempted = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._joining) + len(self._running) + len(self._away)

    def ids(self) -> list[RequestId]:
        return [*self._running, *self._joining, *self._waiting, *self._away]

    def find(self, id: RequestId) -> SimulatedRequest | None:
        own = self._running.get(id) or self._joining.get(id)
        return own or self._waiting.get(id) or self._away.get(id)

    def steps_at(self, now_s: float) -> int:
        span = self._span
        if span is None or span.interval.prefill:
            return self._steps
        return self._steps + span.steps_at(now_s)

    @property
    def next_s(self) -> float:
        """Time of the batch's next change; infinite when the batch is empty."""
        if self._span:
            return min(self._span.interval.end_s, self._back_s)
        return self._back_s if len(self) == len(self._away) else self._free_s

    @property
    def _back_s(self) -> float:
        """Time at which the next conversation returns from its environment."""
        if not self._away:
            return math.inf
        return min(one.back_s for one in self._away.values() if one.back_s is not None)

    def add(self, members: Sequence[SimulatedRequest], now_s: float, load_s: float = 0.0) -> None:
        """Add requests. `load_s` delays the next step, except during a prefill, which hides it.

        Raise ValueError when a request does not fit in the KV cache.
        """
        self.interrupt(now_s)
        for member in members:
            size = member.context(0) - member.done + member.length
            size += sum(turn.num_observed or 0 for turn in member.turns) - member.observed
            if size > self._capacity:
                raise ValueError(
                    f"{member.request.id} needs {size} tokens of KV cache, but an engine has "
                    f"{self._capacity}: raise max_context_tokens"
                )
            member.draft(self._drafting, self._costs.paces)
            place = self._waiting if member.back_s is None else self._away
            place[member.request.id] = member
        self._free_s = max(self._free_s, now_s) + (0.0 if self._span else load_s)
        self.advance(now_s)

    def remove(
        self, ids: Sequence[RequestId], now_s: float
    ) -> tuple[list[SimulatedRequest], float]:
        """Remove requests when the step in progress ends. Return those that are unfinished then,
        and the time."""
        self.interrupt(now_s)
        removed = [member for id in ids if (member := self._remove(id))]
        self.advance(now_s)
        return removed, max(now_s, self._free_s) if removed else now_s

    def set_drafting(self, setting: DraftSetting | None, now_s: float) -> None:
        """Change the engine's draft setting when the step in progress ends; None turns drafting
        off. Requests keep their fraction of a token.

        Raise ValueError when the window is below 1.
        """
        _check(setting)
        assert self._choose_drafting is None, "choose_drafting sets the drafting of this engine"
        if setting == self._drafting:
            return
        self.interrupt(now_s)
        self._redraft(setting)
        if self._span is None:
            self._make_room()
        self.advance(now_s)

    def redraft(self, settings: Mapping[RequestId, DraftSetting], now_s: float) -> None:
        """Change the draft settings of single requests when the step in progress ends. Ignore
        requests that are not here. Raise ValueError as `set_drafting` does."""
        for setting in settings.values():
            _check(setting)
        self.interrupt(now_s)
        for id, setting in settings.items():
            if member := self.find(id):
                self._change(member, setting)
        if self._span is None:
            self._make_room()
        self.advance(now_s)

    def count(self, ids: Sequence[RequestId], now_s: float) -> tuple[list[SimulatedRequest], float]:
        """Update the tokens of requests at the end of the step in progress. Return those that are
        unfinished then, and the time. The requests go on."""
        self.interrupt(now_s)
        members = [member for id in ids if (member := self.find(id))]
        for member in members:
            if member.joined is not None:
                self._leave(member)
                self._run(member)
        self.advance(now_s)
        return members, max(now_s, self._free_s) if members else now_s

    def advance(self, now_s: float) -> None:
        """Complete everything that ends by `now_s`, and begin the next span of steps."""
        while True:
            until_s = min(now_s, self._back_s) + ROUNDING_S
            if self._span is None and self._free_s <= until_s:
                self._span = self._next_span()
            if self._span and self._span.interval.end_s <= until_s:
                self._complete(self._span, self._span.steps)
            elif self._back_s <= until_s:
                self._come_back()
            else:
                return

    def _come_back(self) -> None:
        """Let the next conversation return that waits for its environment."""
        back_s = self._back_s
        id = next(id for id, member in self._away.items() if member.back_s == back_s)
        self._end_span(back_s)
        member = self._away.pop(id)
        member.begin_turn()
        self._waiting[id] = member
        self._waiting.move_to_end(id, last=False)
        self._free_s = max(self._free_s, back_s)

    def interrupt(self, now_s: float) -> None:
        """End the span of decode steps with the step in progress. A prefill goes on, because its
        batch is fixed."""
        self.advance(now_s)
        self._end_span(now_s)

    def _end_span(self, now_s: float) -> None:
        span = self._span
        if span is None or span.interval.prefill:
            return
        steps = span.steps_at(now_s)
        if span.interval.start_s + span.seconds(steps) < now_s - ROUNDING_S:
            steps += 1
        self._complete(span, steps)

    def _next_span(self) -> SteadyBatch | None:
        self._join()
        if self._joining:
            return self._prefill()
        if not self._running:
            return None
        if self._choose_drafting:
            setting = self._choose_drafting(len(self._running), self._context / PARTS)
            if setting != self._drafting:
                self._redraft(setting)
                self._make_room()
        for _ in range(_MAX_SETTLING):
            if not self._costs.set_paces(self._context / PARTS):
                break
            self._redraft(self._drafting)
            self._make_room()
        return self._decode()

    def _redraft(self, setting: DraftSetting | None) -> None:
        """Change the draft setting of all requests, between two steps."""
        running = list(self._running.values())
        for member in running:
            self._leave(member)
        self._ends = []
        self._drafting = setting
        others = (self._joining, self._waiting, self._away)
        for member in (*running, *(one for place in others for one in place.values())):
            member.draft(self._drafting, self._costs.paces)
        for member in running:
            self._run(member)

    def _change(self, member: SimulatedRequest, own: DraftSetting) -> None:
        runs = member.joined is not None
        if runs:
            self._leave(member)
        member.request = replace(member.request, drafting=own)
        member.draft(self._drafting, self._costs.paces)
        if runs:
            self._run(member)

    def _join(self) -> None:
        """Move waiting requests into the batch, first come first served, while they fit."""
        room = self._room_parts()
        while self._waiting and len(self._running) + len(self._joining) < self._max_num_seqs:
            member = next(iter(self._waiting.values()))
            # The request needs its context, the token of the prefill and the tokens of one step.
            room -= member.context_parts(self._steps) + PARTS + member.rate
            if room < 0 and (self._running or self._joining):
                return
            id, member = self._waiting.popitem(last=False)
            if member.has_kv:
                self._run(member)
            else:
                self._joining[id] = member

    def _prefill(self) -> SteadyBatch:
        joining = self._joining.values()
        squares = sum((one.context(self._steps) - one.num_cached) ** 2 for one in joining)
        rms = math.sqrt(squares / len(joining))
        seconds = self._latency.prefill_s(self._tp_degree, len(joining), rms)
        return self._span_of((Stretch(1, seconds, 0.0),), prefill=True)

    def _decode(self) -> SteadyBatch:
        while self._running.get(self._ends[0][2].request.id) is not self._ends[0][2]:
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self._steps
        if self._capacity < math.inf:
            steps = min(steps, max(1, 1 + int(self._room_parts()) // self._growth))
        growth, context = self._growth / PARTS, self._context / PARTS
        return self._span_of(
            plan_stretches(self._costs.step_s(), growth, context, steps), prefill=False
        )

    def _span_of(self, stretches: tuple[Stretch, ...], prefill: bool) -> SteadyBatch:
        seconds = sum(stretch.seconds(stretch.steps) for stretch in stretches)
        batch, end_s = len(self._running) + len(self._joining), self._free_s + seconds
        interval = Interval(self._free_s, end_s, batch, len(self._waiting), prefill)
        return SteadyBatch(interval, stretches)

    def _complete(self, span: SteadyBatch, steps: int) -> None:
        self._span = None
        if not steps:
            return
        self._free_s = span.interval.start_s + span.seconds(steps)
        self._record(span.interval._replace(end_s=self._free_s, drafter=self._costs.drafter))
        if span.interval.prefill:
            self._run_joined()
        else:
            self._steps += steps
            self._context += steps * self._growth
        self._finish()
        self._make_room()

    def _record(self, new: Interval) -> None:
        last = self.intervals[-1] if self.intervals else None
        if last and last.end_s == new.start_s and last[2:] == new[2:]:
            self.intervals[-1] = new._replace(start_s=last.start_s)
        else:
            self.intervals.append(new)

    def _run_joined(self) -> None:
        joining, self._joining = self._joining, {}
        for member in joining.values():
            member.done += 1
            member.has_kv = True
            self._run(member)

    def _run(self, member: SimulatedRequest) -> None:
        member.joined = self._steps
        self._running[member.request.id] = member
        self._context += member.context_parts(self._steps)
        self._growth += member.rate
        self._costs.add(member)
        self._num_joined += 1
        heapq.heappush(self._ends, (self._steps + member.steps_left, self._num_joined, member))

    def _leave(self, member: SimulatedRequest) -> None:
        del self._running[member.request.id]
        self._context -= member.context_parts(self._steps)
        self._growth -= member.rate
        self._costs.remove(member)
        member.leave(self._steps)

    def _finish(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, member = heapq.heappop(self._ends)
            # Requests that left early stay in the heap until their planned end.
            running = self._running.get(member.request.id) is member
            if running and member.tokens(self._steps) >= member.stop:
                self._leave(member)
                if member.done < member.length:
                    member.end_turn(self._free_s)
                    self._away[member.request.id] = member
                    continue
                member.finished_s = self._free_s
                self.finished.append(member)

    def _room_parts(self) -> float:
        """Return the free space of the KV cache after the next step, in parts of a token."""
        return self._capacity * PARTS - self._context - self._growth

    def _make_room(self) -> None:
        while len(self._running) > 1 and self._room_parts() < 0:
            self._preempt()

    def _preempt(self) -> None:
        id, member = next(reversed(self._running.items()))
        self._leave(member)
        member.has_kv, member.num_cached = False, 0
        self._waiting[id] = member
        self._waiting.move_to_end(id, last=False)
        self.num_preempted += 1

    def _remove(self, id: RequestId) -> SimulatedRequest | None:
        if member := self._running.get(id):
            self._leave(member)
            return member
        others = (self._joining, self._waiting, self._away)
        return next((place.pop(id) for place in others if id in place), None)


def _check(setting: DraftSetting | None) -> None:
    if setting and setting.window < 1:
        raise ValueError(
            f"a draft window is at least 1, not {setting.window}: None turns drafting off"
        )
