"""Drafting from history in virtual engines, where it pays in the running batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from refrain.engines.latency.drafted import DraftingIncluded
from refrain.engines.latency.interface import Latency
from refrain.engines.simulate.member import Passes
from refrain.schemas.drafting import HISTORY
from refrain.schemas.rollout import DraftSetting


@dataclass(frozen=True)
class GatedHistory:
    """Verifies as much as pays best in the running batch, or nothing: "the maximum viable batch
    size for throughput gains" (RhymeRL 5.4). `engines.simulate.batching` calls it. Its window is
    the number of a level, from 1."""

    latency: Latency
    tp_degree: int
    levels: tuple[Passes, ...]
    """Mean passes of a request when it verifies more or fewer of its drafts."""

    @cached_property
    def by_window(self) -> Mapping[int, Passes]:
        """Levels by number, for `engines.simulate.member`."""
        return dict(enumerate(self.levels, 1))

    def __call__(self, batch: int, context_tokens: float) -> DraftSetting | None:
        best, best_s = None, self.latency.decode_s(self.tp_degree, batch, context_tokens)
        for window, level in self.by_window.items():
            token_s = self._token_s(level, batch, context_tokens)
            if token_s < best_s:
                best, best_s = window, token_s
        return DraftSetting(HISTORY, best) if best else None

    def token_s(self, batch: int, context_tokens: float) -> float:
        """Return the seconds of one token of every sequence."""
        setting = self(batch, context_tokens)
        if setting is None:
            return self.latency.decode_s(self.tp_degree, batch, context_tokens)
        return self._token_s(self.by_window[setting.window], batch, context_tokens)

    def pass_s(self, level: Passes, batch: int, context_tokens: float) -> float:
        """Return the seconds of a pass with drafting, linear between whole windows."""
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
class TokenLatency(DraftingIncluded):
    """Latency of decoding with these drafts."""

    gate: GatedHistory

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        assert tp_degree == self.gate.tp_degree
        return self.gate.token_s(batch, context_tokens)

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        return self.gate.latency.prefill_s(tp_degree, batch, rms_tokens)
