"""Event-driven simulations of a drafter and a verifier, to check `engines.latency.expectation`.

They follow the protocol and share no code with the formulas. Each draft token is right with
probability p, drawn when it is drafted. After a wrong token, all that follow are useless.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

DRAFTED, VERIFIED = 0, 1


@dataclass
class Machine:
    window: int
    acceptance: float
    draft_token_s: float
    verify_s: float
    seed: int = 0
    num_tokens: int = 0
    now_s: float = 0.0
    most_wasted: int = 0
    """Most draft tokens that one mismatch cost."""
    pending: list[bool] = field(default_factory=list)
    """Whether each unverified draft token is right."""

    def run(self, num_steps: int) -> "Machine":
        self._random = random.Random(self.seed)
        self._events, self._generation, self._drafting = [], 0, False
        self._begin_step()
        self._begin_token()
        while num_steps:
            self.now_s, kind, payload = heapq.heappop(self._events)
            if kind == DRAFTED and payload == self._generation:
                self._drafting = False
                self.pending.append(self._random.random() < self.acceptance)
                self._begin_token()
            elif kind == VERIFIED:
                self._end_step(payload)
                num_steps -= 1
        return self

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.now_s

    def _begin_token(self) -> None:
        if not self._drafting and len(self.pending) < 2 * self.window - 1:
            self._drafting = True
            at_s = self.now_s + self.draft_token_s
            heapq.heappush(self._events, (at_s - 1e-9, DRAFTED, self._generation))

    def _begin_step(self) -> None:
        taken = min(len(self.pending), self.window)
        heapq.heappush(self._events, (self.now_s + self.verify_s, VERIFIED, taken))

    def _end_step(self, taken: int) -> None:
        verified, beyond = self.pending[:taken], self.pending[taken:]
        num_right = verified.index(False) if False in verified else taken
        self.num_tokens += num_right + 1
        if num_right == taken and beyond and beyond[0]:
            self.pending = beyond[1:]
        else:
            self.most_wasted = max(self.most_wasted, len(self.pending) - num_right)
            self.pending = []
            self._generation += 1
            self._drafting = False
        self._begin_step()
        self._begin_token()


@dataclass
class BatchMachine:
    """A batch on one verifier. All requests verify in the same step, whose time depends on how much
    it verifies. Meanwhile each request is drafted for, token after token."""

    window: int
    acceptance: float
    draft_token_s: float
    """Seconds to draft one token for each request."""
    verify_s: Callable[[float], float]
    """Seconds of a step, given the mean number of draft tokens that it verifies for a request."""
    batch: int
    seed: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejections: int = 0
    now_s: float = 0.0

    def run(self, num_steps: int) -> "BatchMachine":
        self._random = random.Random(self.seed)
        self._pending: list[list[bool]] = [[] for _ in range(self.batch)]
        self._next_s: list[float | None] = [self.draft_token_s] * self.batch
        """When the next token of each request is drafted. None: its drafter waits."""
        for _ in range(num_steps):
            taken = [min(len(pending), self.window) for pending in self._pending]
            self.now_s += self.verify_s(sum(taken) / self.batch)
            for i, num in enumerate(taken):
                self._draft(i)
                self._verify(i, num)
        self.num_steps = num_steps
        return self

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one request."""
        return self.num_tokens / self.num_steps / self.batch

    @property
    def tokens_per_s(self) -> float:
        """Tokens of one request."""
        return self.num_tokens / self.now_s / self.batch

    def _draft(self, i: int) -> None:
        at_s, pending = self._next_s[i], self._pending[i]
        while at_s is not None and at_s <= self.now_s + 1e-9:
            pending.append(self._random.random() < self.acceptance)
            at_s = at_s + self.draft_token_s if len(pending) < 2 * self.window - 1 else None
        self._next_s[i] = at_s

    def _verify(self, i: int, taken: int) -> None:
        verified, beyond = self._pending[i][:taken], self._pending[i][taken:]
        num_right = verified.index(False) if False in verified else taken
        self.num_tokens += num_right + 1
        self.num_drafted += taken
        self.num_accepted += num_right
        self.num_rejections += num_right < taken
        goes_on = num_right == taken and bool(beyond) and beyond[0]
        self._pending[i] = beyond[1:] if goes_on else []
        if not goes_on or self._next_s[i] is None:
            self._next_s[i] = self.now_s + self.draft_token_s
