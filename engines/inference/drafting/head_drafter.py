"""Drafts from a head on the policy's hidden states (vLLM 0.32, V1 runner).

    step ends: hidden state of each row's last position ─► DraftHead ─► policy's lm_head ─┐
                     ▲ embedding of the drafted token ◄─── draw with the sample's noise ◄─┘

The head draws with the noise that the sample itself has at each position, its temperature, top-k
and top-p (`engines.inference.sampling`). So a draft token is right if both argmaxes agree, which is
likelier than that two independent draws agree. Verification stays as it is: no draft can change a
token. Embedding and `lm_head` are the policy's, so they follow its weights at once.
"""

from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from refrain.engines.draft_head.files import load
from refrain.engines.histospec.gate import Gate
from refrain.engines.inference.drafting.request_drafting import DraftedRow


class HiddenStates(NamedTuple):
    """What the last step's logits were computed from."""

    hidden: Tensor
    """[rows of the logits, hidden size]."""
    num_rows: np.ndarray
    """int64 [requests]: rows of each request, one and its drafts."""

    def rows_after(self, requests: np.ndarray, num_sampled: np.ndarray) -> np.ndarray:
        """Return the rows that drew the last tokens of these requests, int64.

        `num_sampled`: tokens that each request drew in the step, at least 1.
        """
        firsts = np.cumsum(self.num_rows) - self.num_rows
        return firsts[requests] + num_sampled - 1


class HeadDrafter:
    """Drafter of one engine, on its only rank."""

    def __init__(self, runner: Any, directory: Path, gate: Gate) -> None:
        """`directory`: the head's files. `gate`: decides when drafting pays."""
        self.gate = gate
        self._runner, self._policy = runner, runner.get_model()
        self._device = torch.device(runner.device)
        self._of_step: HiddenStates | None = None
        self.load(directory)
        runner.propose_draft_token_ids = self._noting(type(runner).propose_draft_token_ids)

    @torch.inference_mode()
    def load(self, directory: Path) -> None:
        """Draft with the head in this directory from now on.

        Raise ValueError if it is not a head for this policy; the head stays as it was then.
        """
        config = self._runner.model_config
        sizes = {"hidden_size": config.get_hidden_size(), "vocab_size": config.get_vocab_size()}
        self._head = load(directory, **sizes).to(self._device, config.dtype)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftedRow], windows: Sequence[int]) -> list[list[int]]:
        """See `RowDrafter`."""
        assert self._of_step is not None, "called outside of a step"
        drafted = [row for row, window in zip(rows, windows, strict=True) if window]
        places = np.array([(row.row, row.num_sampled) for row in drafted]).T
        last = [(row.text[-1], len(row.text) - 1) for row in drafted]
        of_rows = np.vstack([places[0], self._of_step.rows_after(*places), np.array(last).T])
        on_device = torch.from_numpy(of_rows.astype(np.int64)).to(self._device)
        drawn = iter(self._draw(*on_device, max(windows)).tolist())
        return [next(drawn)[:window] if window else [] for window in windows]

    def _draw(
        self, rows: Tensor, hidden_rows: Tensor, tokens: Tensor, positions: Tensor, window: int
    ) -> Tensor:
        """Return drafts of `window` tokens, int32 [rows, window]. All other arguments are int64
        [rows]; `positions`: those of `tokens`."""
        assert self._of_step is not None
        state, drawn = self._head.begin(self._of_step.hidden[hidden_rows]), []
        for ahead in range(window):
            state = self._head.step(state, self._policy.embed_input_ids(tokens))
            logits = self._policy.compute_logits(self._head.output(state))
            tokens = self._runner.sampler.foresee(logits, rows, positions + ahead)
            drawn.append(tokens)
        return torch.stack(drawn, dim=1)

    def _noting(self, propose: Any) -> Any:
        """Return vLLM's method `propose`, but note the step's hidden states first."""

        def noting(runner: Any, *args: Any) -> Any:
            _, sampled_token_ids, _, _, hidden, _, drafted, *_ = args
            num_drafted = drafted.num_draft_tokens if drafted else [0] * len(sampled_token_ids)
            self._of_step = HiddenStates(hidden, np.array(num_drafted) + 1)
            try:
                return propose(runner, *args)
            finally:
                self._of_step = None

        return MethodType(noting, self._runner)
