"""The draft window that pays most in an engine's running batch."""

from dataclasses import dataclass
from functools import lru_cache

from engines.latency.interface import Latency
from engines.latency.speedup import Drafting, expected_tokens
from schemas.rollout import DraftSetting

CONTEXT_STEP = 512
"""Tokens of a sequence between two contexts for which windows are chosen."""


@dataclass(frozen=True)
class BestWindow:
    """Chooses the window with the most tokens per second, and none where no window pays.

        max_w (1 + p + ... + p^w) / (verify_s(batch, context, w) + draft_s(batch, w))

    RhymeRL sets a window for each response by its luck (2 more after full acceptance, back to 2
    after a rejection, at most 32) and drafts not at all above a profiled batch size (5.4).
    Deviation: with one probability p for every draft token there is no luck to follow, and the
    window is the best one of the batch, 0 to 32.
    """

    latency: Latency
    tp_degree: int
    drafter: str
    acceptance: float
    """Probability that a draft token is accepted when those before it were."""
    max_window: int = 32

    def __call__(self, batch: int, context_tokens: float) -> DraftSetting | None:
        window = _best(self, batch, round(context_tokens / batch / CONTEXT_STEP))
        return DraftSetting(self.drafter, window) if window else None


@lru_cache(maxsize=1 << 16)
def _best(choice: BestWindow, batch: int, context_steps: int) -> int:
    drafting = Drafting(
        choice.latency,
        choice.tp_degree,
        choice.drafter,
        max(1.0, context_steps * CONTEXT_STEP),
        choice.max_window,
    )
    return drafting.best_window(batch, choice.acceptance).window


@dataclass(frozen=True)
class TokenLatency:
    """What a token of every sequence takes with the best window: plans then need not know of it.

    Decoding only: drafting is in it.
    """

    choice: BestWindow

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        latency, setting = self.choice.latency, self.choice(batch, context_tokens)
        if setting is None:
            return latency.decode_s(tp_degree, batch, context_tokens)
        seconds = latency.verify_s(tp_degree, batch, context_tokens, setting.window)
        seconds += latency.draft_s(setting.drafter, batch, setting.window)
        return seconds / expected_tokens(setting.window, self.choice.acceptance)

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        return self.choice.latency.prefill_s(tp_degree, batch, rms_tokens)

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        assert window == 0, "drafting is in the time of decoding"
        return self.decode_s(tp_degree, batch, context_tokens)

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        raise AssertionError(f"{drafter} has drafted {window} tokens for {batch} already")
