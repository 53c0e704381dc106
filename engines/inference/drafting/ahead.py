"""Drafting beside vLLM's scheduler, one step ahead (vLLM 0.32, V2 runner).

With asynchronous scheduling a step is scheduled while the one before it runs, so nobody knows yet
how many tokens that one will add to each request. A draft must not wait for them:

    step t ends       draft what follows the known tokens: those that step t+1 may add, and more
    schedule t+2      reserve room for the tokens to verify; the draft goes along with the step
    step t+2 begins   the worker compares what step t+1 added with the draft (`placing`):
                        all equal      verify the tokens that come after
                        otherwise      the reserved rows verify nothing

So drafts take no time of the GPU's, and after a wrong token one step has no draft. Deviation from
RhymeRL 5.3: there the drafter knows all tokens of the step before.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.histospec.ahead import AheadDrafts
from engines.histospec.budget import max_draft_tokens
from engines.histospec.step_times import pass_content
from engines.inference.drafting.engine_drafting import EngineDrafting
from engines.inference.drafting.step_drafts import StepDrafts
from engines.inference.drafting.texts import Texts
from schemas.config import EngineConfig
from schemas.engine import EngineSetup


@dataclass(frozen=True, slots=True)
class _Proposed:
    """Drafts of the requests of a step."""

    ids: list[str]
    ahead: AheadDrafts

    def of(self, rows: list[int], num_verified: np.ndarray) -> "_Proposed":
        at = np.array(rows, np.int64)
        return _Proposed([self.ids[row] for row in rows], self.ahead.of(at, num_verified))

    def packed(self) -> StepDrafts:
        drafts = self.ahead.drafts
        columns = self.ahead.num_known, drafts.num, drafts.tokens
        return StepDrafts(self.ids, np.column_stack(columns).astype(np.int32))


class AheadProposer(EngineDrafting):
    """The proposer of one engine. It runs in the process of vLLM's scheduler."""

    def __init__(
        self,
        requests: Mapping[str, Any],
        vllm_config: Any,
        config: EngineConfig,
        setup: EngineSetup,
    ) -> None:
        super().__init__(requests, vllm_config, config, setup)
        self._texts = Texts(
            vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
        )
        self._places = np.zeros(0, np.int64)
        """int64 [rows]: the history drafter's place of each request of `_texts`."""
        self._rooms = [[-1] * num for num in range(vllm_config.num_speculative_tokens + 1)]
        """Placeholders for each number of tokens to verify."""
        self._proposed: _Proposed | None = None
        """Drafts for the next step."""
        self._verifying: dict[int, _Proposed] = {}
        """Drafts of each running step, by the identity of its `SchedulerOutput`."""

    def reserve(self, running: Sequence[Any]) -> None:
        """Before a step is scheduled: reserve room for drafts in vLLM's running requests."""
        room = {}
        if self._proposed is not None:
            given = self._proposed.ids, self._proposed.ahead.num_verified.tolist()
            room = {id: num for id, num in zip(*given, strict=True) if num}
        for request in running:
            request.spec_token_ids = self._rooms[room.get(request.request_id, 0)]

    def scheduled(self, step: Any) -> None:
        """After a step was scheduled: give it the drafts that it verifies, as `step.drafts`."""
        proposed, self._proposed = self._proposed, None
        verified = step.scheduled_spec_decode_tokens
        if proposed is None or not verified:
            return
        rows = [row for row, id in enumerate(proposed.ids) if id in verified]
        num = np.array([len(verified[proposed.ids[row]]) for row in rows], np.int32)
        self._verifying[id(step)] = proposed = proposed.of(rows, num)
        step.drafts = proposed.packed()

    def updated(self, step: Any) -> None:
        """After vLLM has appended the tokens of a step: learn from it and draft for a later one."""
        now_s = time.perf_counter()
        self._measured.pass_ended(now_s, self._content(step))
        self._measured.pass_begins(now_s)
        ids = [
            id for id in step.num_scheduled_tokens if id in self._requests or self._texts.has(id)
        ]
        before = self._texts.lengths(ids)
        added = self._append(ids)
        if (verified := self._verifying.pop(id(step), None)) is not None:
            self._learn(verified, dict(zip(ids, before, strict=True)))
        self._forget_ended()
        self._propose(added, now_s)
        self._draft_s += time.perf_counter() - now_s

    def _content(self, step: Any) -> np.ndarray:
        """Return the content of a pass; see `pass_content`."""
        rows = [
            (num, self._texts.num_computed(id), self._texts.num_prompt(id))
            for id, num in step.num_scheduled_tokens.items()
        ]
        columns = np.array(rows, np.int64).reshape(-1, 3).T
        return pass_content(*columns)

    def _append(self, ids: Sequence[str]) -> set[str]:
        """Take over the new tokens of the step's requests. Return those that have some."""
        added = set()
        for one in ids:
            if not self._texts.has(one):
                self._history.begin(self._describe(one))
                self._texts.begin(one, self._requests[one])
            if self._texts.grow(one):
                added.add(one)
        return added

    def _learn(self, verified: _Proposed, before: Mapping[str, int]) -> None:
        """Compare the drafts of a step with the tokens that the requests have now. `before`: tokens
        of each request when the step began."""
        here = [row for row, id in enumerate(verified.ids) if self._texts.has(id)]
        if not here:
            return
        verified = verified.of(here, verified.ahead.num_verified[here])
        ids, ahead = verified.ids, verified.ahead
        right = self._texts.num_right(ids, ahead.num_known, ahead.drafts.tokens, ahead.drafts.num)
        num_before = np.array([before[id] for id in ids], np.int32)
        places, now = self._history.places(ids), self._texts.lengths(ids)
        ahead.learn(self._history, places, right, num_before, now)

    def _forget_ended(self) -> None:
        if ended := [id for id in self._texts.ids if id not in self._requests]:
            for id in ended:
                self._texts.end(id)
            self._history.end_others(self._texts.ids)
        if ended or len(self._places) != len(self._texts.ids):
            self._places = self._history.places(self._texts.ids)

    def _propose(self, added: set[str], now_s: float) -> None:
        """Draft for the requests that have new tokens."""
        ids = list(self._texts.ids)
        self._proposed = None
        if not ids:
            return
        drafting = np.array([id in added for id in ids])
        in_flight = [self._requests[id].num_output_placeholders for id in ids]
        num_tokens = self._texts.lengths(ids)
        plain = self._measured.plain_is_due(now_s)
        budget = 0 if plain else max_draft_tokens(self._max_step_tokens, len(ids))
        looks_s = time.perf_counter()
        drafts, num = self._history.draft_ahead(
            self._places,
            drafting,
            self._texts.tokens[: len(ids)],
            num_tokens,
            np.array(in_flight, np.int32),
            budget,
        )
        self._history.gate.proposed(len(ids), time.perf_counter() - looks_s)
        if num.any():
            self._proposed = _Proposed(ids, AheadDrafts(num_tokens, drafts, num))
