"""Drafting inside a vLLM worker. The proposer replaces vLLM's speculator (vLLM 0.32, V1 runner).

    row without a draft setting, or with `histospec`   HistoryDrafter
    row with another draft setting, `head` too         both; the better draft is verified

vLLM calls `propose` without request ids, so the proposer reads them from the runner. Other facts
about a request travel in `SamplingParams.extra_args`. Import this module only after vLLM has
started, because it uses numba (see `NoDrafts`).
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from refrain.engines.histospec.budget import max_draft_tokens
from refrain.engines.histospec.drafter import DraftedRequest, HistoryDrafter
from refrain.engines.histospec.drafting import NO_KEY
from refrain.engines.histospec.gate import Gate
from refrain.engines.histospec.step_times import pass_content
from refrain.engines.histospec.window import window_policy
from refrain.engines.inference.drafting.gating import max_step_tokens, times_and_gate
from refrain.engines.inference.drafting.head_drafter import HeadDrafter, never_skip
from refrain.engines.inference.drafting.request_drafting import DraftedRow, RequestDrafting
from refrain.engines.inference.engine.extra_args import DRAFTING, PROMPT_KEY, SAMPLE_KEY, TURN_START
from refrain.engines.inference.engine.process import submitted_as
from refrain.engines.inference.sampling.step_rows import GREEDY_BELOW
from refrain.schemas.config import EngineConfig
from refrain.schemas.drafting import HISTORY
from refrain.schemas.engine import EngineSetup
from refrain.schemas.rollout import DraftSetting


class Proposer:
    """The proposer of one engine. It runs on the engine's first rank."""

    def __init__(self, runner: Any, config: EngineConfig, setup: EngineSetup, engine: int) -> None:
        drafting = config.drafting
        self._runner = runner
        never_skip(runner)
        self._max_step_tokens = max_step_tokens(runner.vllm_config)
        self._measured, gate = times_and_gate(config, setup)
        self._history_is_on, self._foresees = drafting.enabled, drafting.look_ahead
        self._history = HistoryDrafter(
            Path(config.history_dir),
            window_policy(drafting.window, drafting.max_draft),
            gate,
            runner.vllm_config.scheduler_config.max_num_seqs,
            shares=drafting.shared_tokens > 0,
        )
        vocab_size = runner.model_config.get_vocab_size()
        head = config.specactor.head
        self.head = HeadDrafter(runner, head, Gate(gate.times)) if head else None
        self._own = RequestDrafting(engine, vocab_size, self._history.acceptance, self.head)
        """Drafting for requests that have their own draft setting."""
        self._draft_s = 0.0
        self._ids: list[str] = []
        self._places = np.zeros(0, np.int64)
        self._own_rows: list[tuple[int, str]] = []
        """(row, id) of the requests that have their own draft setting."""
        self._restore(setup.learnt)

    def take_counts(self) -> dict[str, Any]:
        """Return the counts since the last call, and the learnt state for a successor."""
        counts = asdict(self._history.take_counts())
        counts["draft_s"] = self._draft_s
        counts |= self._measured.take()
        counts |= {"step_costs": self._measured.costs, "plain_error": self._measured.plain_error}
        counts["learnt"] = self._learnt()
        self._draft_s = 0.0
        return counts

    def connect(self, addresses: Mapping[str, str]) -> None:
        self._own.connect(addresses)

    def expect(self, prompt_keys: Sequence[str]) -> None:
        """Open the indexes of these prompts in a thread: requests for them are on their way."""
        if self._history_is_on:
            self._history.expect(prompt_keys)

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
        if self.head is not None:
            self.head.end_step()
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

    def _restore(self, learnt: str) -> None:
        # The learnt state saves a few seconds only. If it is absent or from another version of
        # refrain, start without it.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            state = json.loads(learnt)
            self._history.restore(state["history"])
            self._measured.restore(state["step_times"])

    def _learnt(self) -> str:
        state = {"history": self._history.state(), "step_times": self._measured.state()}
        return json.dumps(state)

    def _extra_args(self, id: str) -> dict[str, Any]:
        return self._runner.requests[id].sampling_params.extra_args or {}

    def _describe(self, id: str) -> DraftedRequest:
        """Describe a request for the history drafter. A canary has no prompt key."""
        state = self._runner.requests[id]
        key = self._extra_args(id).get(PROMPT_KEY, "") if self._history_is_on else ""
        max_tokens = state.num_prompt_tokens + (state.sampling_params.max_tokens or 0)
        return DraftedRequest(
            id,
            key,
            max_tokens,
            sample_key=self._foreseen_key(id) if key else NO_KEY,
            turn_start=self._extra_args(id).get(TURN_START, 0),
        )

    def _foreseen_key(self, id: str) -> int:
        """Return the sample key, or NO_KEY if noise must not guide the request's drafts."""
        params = self._runner.requests[id].sampling_params
        drawn = self._foresees and params.temperature >= GREEDY_BELOW
        return self._extra_args(id)[SAMPLE_KEY] if drawn else NO_KEY
