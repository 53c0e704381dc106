"""Estimates of decoupled drafting that are less exact than that of `engines.specactor.expectation`.

    paper      tau_w / max(w D, V)      tau_w = sum_{a<w} p^a (1-p) (a+1) / 2 + w p^w
    windowed   tau / max(w D, V)        tau = (1 + p + ... + p^(w-1) + 1 - p^w) / (2 - p^w)

Windowed is renewal-reward over cycles that end with a mismatch: windows of w tokens, each whole
with probability p^w, then one with a < w right ones, worth a + 1, and a step worth 1. It assumes
that the verifier waits for whole windows, and that a whole one is worth w: one token less is in
flight for the one more that the model gives.
"""

from engines.specactor.expectation import _require, expected_tokens


def paper_tokens(window: int, acceptance: float) -> float:
    """tau_w: tokens per window of decoupled drafting, as the paper has it."""
    _require(window, acceptance)
    partial = sum(acceptance**a * (1 - acceptance) * (a + 1) / 2 for a in range(window))
    return partial + window * acceptance**window


def windowed_tokens(window: int, acceptance: float) -> float:
    """Tokens per verification of decoupled drafting, where the verifier waits for whole windows."""
    _require(window, acceptance)
    whole = acceptance**window
    return (expected_tokens(window - 1, acceptance) + 1 - whole) / (2 - whole)


def paper_tokens_per_s(
    window: int, acceptance: float, draft_token_s: float, verify_s: float
) -> float:
    """TGS of the paper."""
    return paper_tokens(window, acceptance) / max(window * draft_token_s, verify_s)


def windowed_tokens_per_s(
    window: int, acceptance: float, draft_token_s: float, verify_s: float
) -> float:
    """Tokens per second where the verifier waits for whole windows."""
    return windowed_tokens(window, acceptance) / max(window * draft_token_s, verify_s)
