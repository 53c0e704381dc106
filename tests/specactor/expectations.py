"""Estimates of decoupled drafting: those of `engines.latency.expectation`, and less exact ones.

    paper      tau_w / max(w D, V)      tau_w = sum_{a<w} p^a (1-p) (a+1) / 2 + w p^w
    windowed   tau / max(w D, V)        tau = (1 + p + ... + p^(w-1) + 1 - p^w) / (2 - p^w)

The windowed estimate is renewal-reward over cycles that end with a mismatch. A cycle has whole
windows of w tokens, each with probability p^w. Then comes a window with a < w right tokens, worth
a + 1, and a step worth 1. The estimate assumes that the verifier waits for whole windows. It counts
a whole window as w: the model adds a token, but one draft token fewer is under way.
"""

from engines.latency.expectation import expected_tokens, streamed_step


def streamed_tokens_per_s(
    window: int, acceptance: float, draft_token_s: float, verify_s: float
) -> float:
    """Return tokens per second by `streamed_step`."""
    return streamed_step(window, acceptance, verify_s / draft_token_s).tokens / verify_s


def coupled_tokens_per_s(
    window: int, acceptance: float, draft_window_s: float, verify_s: float
) -> float:
    """Return tokens per second when drafting and verification take turns."""
    return expected_tokens(window, acceptance) / (draft_window_s + verify_s)


def _require(window: int, acceptance: float) -> None:
    if window < 1 or not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"window {window} must be >= 1 and acceptance {acceptance} in [0, 1]")


def paper_tokens(window: int, acceptance: float) -> float:
    """Return tau_w: tokens per window of decoupled drafting, by the paper's formula."""
    _require(window, acceptance)
    partial = sum(acceptance**a * (1 - acceptance) * (a + 1) / 2 for a in range(window))
    return partial + window * acceptance**window


def windowed_tokens(window: int, acceptance: float) -> float:
    """Return tokens per verification of decoupled drafting, if the verifier waits for whole
    windows."""
    _require(window, acceptance)
    whole = acceptance**window
    return (expected_tokens(window - 1, acceptance) + 1 - whole) / (2 - whole)


def paper_tokens_per_s(
    window: int, acceptance: float, draft_token_s: float, verify_s: float
) -> float:
    """Return the TGS of the paper."""
    return paper_tokens(window, acceptance) / max(window * draft_token_s, verify_s)


def windowed_tokens_per_s(
    window: int, acceptance: float, draft_token_s: float, verify_s: float
) -> float:
    """Return tokens per second, if the verifier waits for whole windows."""
    return windowed_tokens(window, acceptance) / max(window * draft_token_s, verify_s)
