"""Choose between two drafts of each request on the device, by how often each would have been right.

    step ends: its tokens ─► compare with both drafts for them ─► share of right tokens, by source
                             new drafts ─► for each request, that of the source with more ─► verify

Both drafts are known before the tokens, so the draft that was not verified is compared, too. No
step waits for the host.
"""

import torch
from torch import Tensor

FORGET = 1.0 - 2.0**-8
"""Weight that the shares keep from step to step."""
NO_DRAFT = -1


class DraftChoice:
    """Choice of one engine between two sources of drafts."""

    def __init__(self, num_slots: int, window: int, device: torch.device) -> None:
        """`num_slots`: places of requests. `window`: longest draft."""
        self._offered = torch.full((2, num_slots, window), NO_DRAFT, device=device)
        """int64: the last draft of each source, by slot."""
        self._right, self._tried = torch.zeros(2, 2, device=device)
        """float32 [sources]: draft tokens that were right, and those compared."""

    def begin(self, slot: int) -> None:
        """Forget the drafts for the request that had this slot before."""
        self._offered[:, slot] = NO_DRAFT

    def learn(self, slots: Tensor, tokens: Tensor, num_tokens: Tensor) -> None:
        """Compare the last drafts with what was sampled.

        `slots`: int64 [requests]. `tokens`: int64 [requests, window], the step's tokens of each
        request, first `num_tokens` [requests] of them; the others are ignored.
        """
        offered = self._offered[:, slots]
        columns = torch.arange(offered.shape[2], device=slots.device)
        known = columns < num_tokens[:, None]
        same = (offered == tokens) & known
        right = same.cumprod(dim=2).sum(dim=2)
        compared = ((offered != NO_DRAFT) & known).sum(dim=2)
        tried = torch.minimum(right + 1, compared)
        self._right = self._right * FORGET + right.sum(dim=1)
        self._tried = self._tried * FORGET + tried.sum(dim=1)

    def choose(self, slots: Tensor, drafts: Tensor) -> Tensor:
        """Return the draft of each request, int64 [requests, window].

        `drafts`: int64 [2, requests, window], by source; `NO_DRAFT` where there is none.
        """
        self._offered[:, slots] = drafts
        first, second = drafts
        shares = (self._right + 1.0) / (self._tried + 2.0)
        has_first, has_second = first[:, :1] != NO_DRAFT, second[:, :1] != NO_DRAFT
        return torch.where(has_first & ((shares[0] >= shares[1]) | ~has_second), first, second)
