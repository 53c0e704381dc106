"""A draft head on one rank of an engine, for both of vLLM's model runners (vLLM 0.32).

    hidden state of the last token ─► DraftHead ─► rows of the lm_head ─┐
             ▲ embedding of the drafted token ◄─ draw with the noise ◄──┘

The head draws with the noise that the sample itself has at each position, its temperature, top-k
and top-p (`engines.inference.sampling`). So a draft token is right if both argmaxes agree, which is
likelier than that two independent draws agree. Verification stays as it is: no draft can change a
token. Embedding and `lm_head` are the policy's. The head's rows of the `lm_head` are copied after
each weight update.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refrain.engines.draft_head.files import load
from refrain.engines.inference.drafting.output_layer import OutputLayer
from refrain.engines.inference.sampling.step_rows import LogitColumns

DrawNext = Callable[[Tensor, LogitColumns, Tensor], Tensor]
"""Function that returns the token which each row draws, int32 [rows], from its logits
[rows, columns] and the position of the token before the drawn one, int64 [rows]."""


class EngineHead:
    """The head on one rank. All ranks call its methods alike."""

    def __init__(self, runner: Any, directory: Path) -> None:
        """`directory`: the head's files."""
        self._policy, self._config = runner.get_model(), runner.model_config
        self._device = torch.device(runner.device)
        self.load(directory)

    @torch.inference_mode()
    def load(self, directory: Path) -> None:
        """Draft with the head in this directory from now on.

        Raise ValueError if it is not a head for this policy; the head stays as it was then.
        """
        vocab_size = self._config.get_vocab_size()
        head = load(directory, hidden_size=self._config.get_hidden_size(), vocab_size=vocab_size)
        self._head = head.to(self._device, self._config.dtype)
        self._columns = LogitColumns(self._head.token_ids, vocab_size)
        self.copy_output_layer()

    @torch.inference_mode()
    def copy_output_layer(self) -> None:
        """Copy the rows of the policy's `lm_head` that the head needs. Call it after each weight
        update."""
        self._output_layer = OutputLayer.of(self._policy, self._head.token_ids, self._head.scale)

    def draft(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, window: int, foresee: DrawNext
    ) -> Tensor:
        """Return drafts of `window` tokens, int32 [rows, window].

        `hidden`: [rows, hidden size], what the last tokens were drawn from. `tokens`, `positions`:
        int64 [rows], of the last tokens.
        """
        state, drawn = self._head.begin(hidden), []
        for ahead in range(window):
            state = self._head.step(state, self._policy.embed_input_ids(tokens))
            logits = self._output_layer.logits(self._head.output(state))
            tokens = foresee(logits, self._columns, positions + ahead)
            drawn.append(tokens)
        return torch.stack(drawn, dim=1)
