"""Drafts from a head on the policy's hidden states (vLLM 0.32, V1 runner).

After a step, the host decides which rows draft, and `EngineHead` drafts for them. With TP, each
rank has a share of the embedding. The first rank decides and tells the others, which then draft the
same tokens with it (`HeadFollower`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed
from vllm.distributed.parallel_state import get_tp_group

from refrain.engines.histospec.gate import Gate
from refrain.engines.inference.drafting.engine_head import EngineHead
from refrain.engines.inference.drafting.request_drafting import DraftedRow
from refrain.engines.inference.sampling.step_rows import LogitColumns


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


class RankHead(EngineHead):
    """The head on one rank of an engine."""

    def __init__(self, runner: Any, directory: Path) -> None:
        """`directory`: the head's files."""
        super().__init__(runner, directory)
        self._ranks = get_tp_group()
        self._runner = runner
        self._of_step: HiddenStates | None = None
        runner.propose_draft_token_ids = self._noting(type(runner).propose_draft_token_ids)

    @property
    def of_step(self) -> HiddenStates:
        assert self._of_step is not None, "called outside of a step"
        return self._of_step

    def draw(self, of_rows: Tensor, window: int) -> Tensor:
        """Return drafts of `window` tokens, int32 [rows, window]. All ranks call this alike.

        `of_rows`: int64 [4, rows], for each request its row, the row of its hidden state, and its
        last token with the position.
        """
        rows, hidden_rows, tokens, positions = of_rows.to(self._device)

        def foresee(logits: Tensor, columns: LogitColumns, positions: Tensor) -> Tensor:
            return self._runner.sampler.foresee(logits, columns, rows, positions)

        hidden = self.of_step.hidden[hidden_rows]
        return self.draft(hidden, tokens, positions, window, foresee)

    def share(self, values: Tensor) -> Tensor:
        """Return the first rank's values on all ranks, int64."""
        if self._ranks.world_size > 1:
            distributed.broadcast(values, self._ranks.first_rank, group=self._ranks.cpu_group)
        return values

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


class HeadDrafter(RankHead):
    """Drafter of one engine, on its first rank."""

    def __init__(self, runner: Any, directory: Path, gate: Gate) -> None:
        """`directory`: the head's files. `gate`: decides when drafting pays."""
        super().__init__(runner, directory)
        self.gate = gate
        self._has_drafted = False

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftedRow], windows: Sequence[int]) -> list[list[int]]:
        """See `RowDrafter`. Call it once a step at most."""
        assert not self._has_drafted
        drafted = [row for row, window in zip(rows, windows, strict=True) if window]
        places = np.array([(row.row, row.num_sampled) for row in drafted]).T
        last = [(row.text[-1], len(row.text) - 1) for row in drafted]
        of_rows = np.vstack([places[0], self.of_step.rows_after(*places), np.array(last).T])
        # Ranks send memory as it lies.
        of_rows = np.ascontiguousarray(of_rows, np.int64)
        self.share(torch.tensor([len(drafted), max(windows)]))
        self._has_drafted = True
        drawn = iter(self.draw(self.share(torch.from_numpy(of_rows)), max(windows)).tolist())
        return [next(drawn)[:window] if window else [] for window in windows]

    def end_step(self) -> None:
        """Let the other ranks go on if nothing was drafted. Call it in each step."""
        if not self._has_drafted:
            self.share(torch.zeros(2, dtype=torch.int64))
        self._has_drafted = False


class HeadFollower(RankHead):
    """Speculator of another rank: it drafts along with the first one, and hands nothing in."""

    def __init__(self, runner: Any, directory: Path) -> None:
        super().__init__(runner, directory)
        never_skip(runner)

    @torch.inference_mode()
    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM calls this after each step, as it calls `Proposer.propose` on the first rank."""
        del args, kwargs
        num_rows, window = self.share(torch.zeros(2, dtype=torch.int64)).tolist()
        if num_rows:
            self.draw(self.share(torch.zeros((4, num_rows), dtype=torch.int64)), window)
        return []


def never_skip(runner: Any) -> None:
    """Let vLLM call the speculator in each step. Else it skips all drafts while one request nears
    the end of its context."""
    runner.effective_drafter_max_model_len = sys.maxsize
