"""HistoSpec's draft window (RhymeRL 5.4) where nothing but an acceptance is known. Pure.

Every draft token is accepted with probability p when those before it were. The window begins at 2,
grows by 2 when all of it is accepted, up to 32, and falls to 2 at a rejection: a Markov chain, of
whose windows w the share s_w is stationary. A verification then drafts sum_w s_w w tokens and
yields sum_w s_w (1 + p + ... + p^w), the model's own included.

Deviations: every step has something to draft, where a run sometimes finds no match; p is the same
for all, where matches come in bursts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from engines.latency.expectation import expected_tokens
from engines.latency.interface import Latency
from engines.simulate.member import Passes
from schemas.drafting import HISTORY
from schemas.rollout import DraftSetting

WINDOWS = tuple(range(2, 33, 2))
NUM_PASSES = 1 << 16
"""Passes of which the mean is given: expectations as whole numbers."""


@dataclass(frozen=True)
class Aimd:
    """The window in the long run."""

    acceptance: float
    """p, below 1."""

    @cached_property
    def shares(self) -> Mapping[int, float]:
        """How often each window is tried."""
        tried, reached = {}, 1.0
        for window in WINDOWS:
            tried[window] = reached
            reached *= self.acceptance**window
        tried[WINDOWS[-1]] /= 1 - self.acceptance ** WINDOWS[-1]
        whole = sum(tried.values())
        return {window: times / whole for window, times in tried.items()}

    @cached_property
    def window(self) -> float:
        """Mean draft tokens of a verification."""
        return sum(share * window for window, share in self.shares.items())

    @cached_property
    def tokens(self) -> float:
        """Mean tokens that a verification yields."""
        return sum(
            share * expected_tokens(window, self.acceptance)
            for window, share in self.shares.items()
        )

    @property
    def speculation(self) -> tuple[float, int]:
        """Tokens and draft tokens of a forward pass, as a run measures them."""
        return self.tokens, round(self.window)

    @property
    def passes(self) -> Passes:
        drafted = round(self.window * NUM_PASSES)
        return Passes(NUM_PASSES, self.tokens * NUM_PASSES, NUM_PASSES, drafted)


ACCEPTANCE = 0.72
"""Assumed: the middle of the 65 to 79 % of drafted tokens that are accepted (7.2.2), taken as the
probability of each. Of the window's tokens, 2 to 32, fewer are then accepted than printed."""
TYPICAL = Aimd(ACCEPTANCE)


@dataclass(frozen=True)
class GatedHistory:
    """Drafts as pays best in the running batch, and not at all where nothing does: "the maximum
    viable batch size for throughput gains" (5.4). What `engines.simulate.batching` asks; a window
    is the place of a level, from 1."""

    latency: Latency
    tp_degree: int
    levels: tuple[Passes, ...]
    """Mean passes of a request when more or less of what is drafted is verified."""

    @cached_property
    def by_window(self) -> Mapping[int, Passes]:
        """Levels as `engines.simulate.member` takes them."""
        return dict(enumerate(self.levels, 1))

    def __call__(self, batch: int, context_tokens: float) -> DraftSetting | None:
        best, best_s = None, self.latency.decode_s(self.tp_degree, batch, context_tokens)
        for window, level in self.by_window.items():
            token_s = self._token_s(level, batch, context_tokens)
            if token_s < best_s:
                best, best_s = window, token_s
        return DraftSetting(HISTORY, best) if best else None

    def token_s(self, batch: int, context_tokens: float) -> float:
        """Time that a token of every sequence takes."""
        setting = self(batch, context_tokens)
        if setting is None:
            return self.latency.decode_s(self.tp_degree, batch, context_tokens)
        return self._token_s(self.by_window[setting.window], batch, context_tokens)

    def pass_s(self, level: Passes, batch: int, context_tokens: float) -> float:
        """A pass, drafting included; linear between whole windows."""
        low, share = divmod(level.num_draft_tokens / level.num_passes, 1)
        at_low, at_high = (
            self._pass_s(batch, context_tokens, int(low) + more) for more in range(2)
        )
        return (1 - share) * at_low + share * at_high

    def _token_s(self, level: Passes, batch: int, context_tokens: float) -> float:
        tokens = level.num_tokens / level.num_passes
        return self.pass_s(level, batch, context_tokens) / tokens

    def _pass_s(self, batch: int, context_tokens: float, window: int) -> float:
        if not window:
            return self.latency.decode_s(self.tp_degree, batch, context_tokens)
        draft_s = self.latency.draft_s(HISTORY, batch, window)
        return draft_s + self.latency.verify_s(self.tp_degree, batch, context_tokens, window)


@dataclass(frozen=True)
class TokenLatency:
    """Time that a token of every sequence takes when engines draft so; decoding is all that a plan
    asks for."""

    gate: GatedHistory

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        assert tp_degree == self.gate.tp_degree
        return self.gate.token_s(batch, context_tokens)

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        return self.gate.latency.prefill_s(tp_degree, batch, rms_tokens)

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        assert window == 0, "drafting is in the time of decoding"
        return self.decode_s(tp_degree, batch, context_tokens)

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        raise AssertionError(f"{drafter} has drafted {window} tokens for {batch} already")
