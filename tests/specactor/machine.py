"""A drafter and its verifiers, token by token, to check `engines.latency`.

The machine shares no code with the formulas. Both ends of each stream are those of a run
(`engines.specactor.streams`). A draft token is right with probability p, drawn when it is drafted.
After a wrong token, all that follow are wrong.

    drafter    reads what was verified, then drafts one token for each request that wants one
    verifier   never waits: at the end of a step it takes the drafts that have arrived
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from refrain.engines.specactor.streams import (
    Drafted,
    DraftStream,
    Opened,
    Verified,
    VerifyStream,
    agreeing,
)
from refrain.schemas.counts import StreamCounts

WRONG, RIGHT = 0, 1
DRAFTER = -1
"""The drafter's place among the events. Engines count from 0."""
NUM_POSITIONS = 1 << 20
TEXT = np.full(NUM_POSITIONS, RIGHT, np.int32)
JITTER = 0.02
"""Steps take up to this share less or more, as on real engines."""


@dataclass
class Row:
    """A request at both ends."""

    drafter: DraftStream
    verifier: VerifyStream
    taken: list[int] = field(default_factory=list)
    """Drafts that the running step verifies."""


@dataclass
class Machine:
    """Engines with equal batches that share one drafter. All requests of an engine verify in the
    same step, whose time depends on how much it verifies."""

    window: int
    acceptance: float
    draft_s: Callable[[int], float]
    """Seconds to draft one token for so many requests."""
    verify_s: Callable[[float], float]
    """Seconds of a step, given the mean number of draft tokens that it verifies for a request."""
    batch: int = 1
    num_engines: int = 1
    seed: int = 0
    num_steps: int = 0
    """Steps of all engines."""
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejections: int = 0
    now_s: float = 0.0

    def run(self, num_steps: int) -> "Machine":
        """Run until each engine has made about so many steps."""
        self._random = random.Random(self.seed)
        self.counts = StreamCounts()
        self._rows = [
            [self._open(f"{engine}-{i}") for i in range(self.batch)]
            for engine in range(self.num_engines)
        ]
        self._drafting: list[Row] | None = None
        """Requests of the drafter's step. None: it waits."""
        self._drafts: list[list[tuple[Row, Drafted]]] = [[] for _ in self._rows]
        """Drafts on their way to each engine."""
        self._verified: list[tuple[Row, Verified]] = []
        self._events: list[tuple[float, int]] = []
        for engine in range(self.num_engines):
            self._begin_step(engine)
        self._begin_drafting()
        while self.num_steps < num_steps * self.num_engines:
            self.now_s, place = heapq.heappop(self._events)
            if place == DRAFTER:
                self._end_drafting()
            else:
                self._end_step(place)
        return self

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one request."""
        return self.num_tokens / self.num_steps / self.batch

    @property
    def tokens_per_s(self) -> float:
        """Tokens of one request."""
        return self.num_tokens / self.now_s / self.batch / self.num_engines

    def _open(self, id: str) -> Row:
        opened = Opened(id, [RIGHT], 0, self.window, False, NUM_POSITIONS)
        return Row(DraftStream(opened, self.counts), VerifyStream(1))

    def _after(self, seconds: float, place: int) -> None:
        seconds *= 1.0 + self._random.uniform(-JITTER, JITTER)
        heapq.heappush(self._events, (self.now_s + seconds, place))

    def _begin_step(self, engine: int) -> None:
        num_taken = sum(len(row.taken) for row in self._rows[engine])
        self._after(self.verify_s(num_taken / self.batch), engine)

    def _end_step(self, engine: int) -> None:
        self.num_steps += 1
        for row in self._rows[engine]:
            self._verify(row)
        for row, told in self._drafts[engine]:
            row.verifier.receive(told, TEXT)
        self._drafts[engine] = []
        for row in self._rows[engine]:
            row.taken = row.verifier.pending[: self.window]
        self._begin_step(engine)
        if self._drafting is None:
            self._begin_drafting()

    def _verify(self, row: Row) -> None:
        num_right = agreeing(row.taken, [RIGHT] * len(row.taken))
        emitted = [RIGHT] * (num_right + 1)
        self._verified.append((row, Verified("", row.verifier.num_tokens, emitted)))
        row.verifier.advance(emitted)
        self.num_tokens += len(emitted)
        self.num_drafted += len(row.taken)
        self.num_accepted += num_right
        self.num_rejections += num_right < len(row.taken)

    def _begin_drafting(self) -> None:
        for row, told in self._verified:
            row.drafter.verified(told)
        self._verified = []
        wanting = [row for rows in self._rows for row in rows if row.drafter.wants]
        self._drafting = wanting or None
        if wanting:
            self._after(self.draft_s(len(wanting)), DRAFTER)

    def _end_drafting(self) -> None:
        for row in self._drafting or []:
            right = WRONG not in row.drafter.ahead and self._random.random() < self.acceptance
            engine = int(row.drafter.opened.id.partition("-")[0])
            told = row.drafter.drafted(RIGHT if right else WRONG, ended=False)
            self._drafts[engine].append((row, told))
        self._begin_drafting()
