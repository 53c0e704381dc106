"""Estimates of tokens per second: those of `engines.latency.expectation`, and the paper's.

paper      tau_w / max(w D, V)      tau_w = sum_{a<w} p^a (1-p) (a+1) / 2 + w p^w
"""

from refrain.engines.latency.expectation import expected_tokens, streamed_step


def streamed_tokens_per_s(
    window: int, acceptance: float, draft_token_s: float, verify_s: float
) -> float:
    """Return tokens per second by `streamed_step`, for one of many requests."""
    return streamed_step(window, acceptance, verify_s / draft_token_s).tokens / verify_s


def coupled_tokens_per_s(
    window: int, acceptance: float, draft_window_s: float, verify_s: float
) -> float:
    """Return tokens per second when drafting and verification take turns."""
    return expected_tokens(window, acceptance) / (draft_window_s + verify_s)


def paper_tokens(window: int, acceptance: float) -> float:
    """Return tau_w: tokens per window of drafting ahead, by the paper's formula."""
    partial = sum(acceptance**a * (1 - acceptance) * (a + 1) / 2 for a in range(window))
    return partial + window * acceptance**window


def paper_tokens_per_s(
    window: int, acceptance: float, draft_token_s: float, verify_s: float
) -> float:
    """Return the TGS of the paper."""
    return paper_tokens(window, acceptance) / max(window * draft_token_s, verify_s)
