"""A drafter and a verifier, event by event: what `engines.specactor.expectation` predicts.

Written from the protocol's words alone. The drafter's tokens are right with probability p, which
is drawn when they are drafted. Once one is wrong, whatever follows it is of no use.
"""

import heapq
import random
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
    """Draft tokens that one mismatch cost."""
    pending: list[bool] = field(default_factory=list)
    """Of every unverified draft token, whether it is right."""

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
