"""Drafting inside a vLLM worker. The proposer replaces vLLM's speculator (vLLM 0.32, V1 runner).

    row without a draft setting, or with `histospec`   HistoryDrafter
    row with another draft setting                     both; the better draft is verified

vLLM calls `propose` without request ids, so the proposer reads them from the runner. Import this
module only after vLLM has started (see `engine_drafting`).
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from engines.histospec.budget import max_draft_tokens
from engines.histospec.step_times import pass_content
from engines.inference.drafting.engine_drafting import EngineDrafting
from engines.inference.drafting.request_drafting import DraftedRow, RequestDrafting
from engines.inference.engine.process import submitted_as
from engines.inference.sampling.drawing import SAMPLE_KEY
from schemas.config import EngineConfig
from schemas.drafting import HISTORY
from schemas.engine import EngineSetup
from schemas.rollout import DraftSetting

DRAFTING = "drafting"
"""Key of the fields of a request's `DraftSetting` in `SamplingParams.extra_args`, if it has one."""


class Proposer(EngineDrafting):
    """The proposer of one engine. It runs on the engine's first rank."""

    def __init__(self, runner: Any, config: EngineConfig, setup: EngineSetup, engine: int) -> None:
        super().__init__(runner.requests, runner.vllm_config, config, setup)
        self._runner = runner
        # Otherwise vLLM skips all drafts while one request nears the end of its context.
        runner.effective_drafter_max_model_len = sys.maxsize
        vocab_size = runner.model_config.get_vocab_size()
        self._own = RequestDrafting(engine, vocab_size, self._history.acceptance)
        """Drafting for requests that have their own draft setting."""
        self._ids: list[str] = []
        self._places = np.zeros(0, np.int64)
        self._own_rows: list[tuple[int, str]] = []
        """(row, id) of the requests that have their own draft setting."""

    def connect(self, addresses: Mapping[str, str]) -> None:
        self._own.connect(addresses)

    def redraft(self, settings: Mapping[str, tuple[str, int, bool]]) -> None:
        """Change the draft settings of requests, by the names they were submitted with."""
        changed = {id: settings[name] for id in self._ids if (name := submitted_as(id)) in settings}
        self._history.end_others([id for id in self._ids if id not in changed])
        for id, setting in changed.items():
            # Keep the setting: the request may leave the batch and return.
            self._extra_args(id)[DRAFTING] = setting
            self._begin(id, DraftSetting(*setting))
        self._place(self._ids)

    def progress(self) -> dict[str, tuple[int, int, int]]:
        """Return (drafted tokens, accepted tokens, drafts with a rejection) of each request that
        has its own draft setting, counted since it got that setting."""
        return {submitted_as(id): counts for id, counts in self._own.progress().items()}

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft of 0..k tokens for each row. vLLM calls this after each step."""
        del slot_mappings
        num_rows = len(sampled_token_ids)
        started_s = time.perf_counter()
        self._measured.pass_ended(started_s, self._pass_content(num_rows))
        self._follow_rows(self._runner.input_batch.req_ids[:num_rows])
        num_tokens = num_tokens_no_spec[:num_rows].astype(np.int32)
        num_sampled = np.fromiter(map(len, sampled_token_ids), np.int32, num_rows)
        plain = self._measured.plain_is_due(started_s)
        budget = 0 if plain else max_draft_tokens(self._max_step_tokens, num_rows)
        own = [
            DraftedRow(row, id, int(num_sampled[row]), token_ids_cpu[row, : num_tokens[row]])
            for row, id in self._own_rows
        ]
        others = self._own.propose(own, num_rows) if own else None
        looks_s = time.perf_counter()
        drafts = self._history.propose(
            self._places, num_sampled, token_ids_cpu[:num_rows], num_tokens, budget, others
        )
        self._history.gate.proposed(num_rows, time.perf_counter() - looks_s)
        self._own.verify(own, drafts)
        begins_s = time.perf_counter()
        self._draft_s += begins_s - started_s
        self._measured.pass_begins(begins_s)
        return drafts

    def _pass_content(self, num_rows: int) -> np.ndarray:
        """Return the content of the pass that has just ended."""
        batch = self._runner.input_batch
        return pass_content(
            np.diff(self._runner.query_start_loc.np[: num_rows + 1]),
            batch.num_computed_tokens_cpu[:num_rows],
            batch.num_prompt_tokens[:num_rows],
        )

    def _follow_rows(self, ids: list[str]) -> None:
        if ids == self._ids:
            return
        self._history.end_others(ids)
        self._own.end_others(ids)
        for id in ids:
            if not self._history.knows(id):
                given = self._extra_args(id).get(DRAFTING)
                self._begin(id, DraftSetting(*given) if given else None)
        self._place(list(ids))

    def _place(self, ids: list[str]) -> None:
        self._ids, self._places = ids, self._history.places(ids)
        self._own_rows = [(row, id) for row, id in enumerate(ids) if self._own.knows(id)]

    def _begin(self, id: str, setting: DraftSetting | None) -> None:
        request = self._describe(id)
        self._history.begin(request)
        self._own.end([id])
        if setting and setting.drafter != HISTORY:
            sample_key = self._extra_args(id)[SAMPLE_KEY]
            self._own.begin(id, setting, sample_key, request.max_tokens)
