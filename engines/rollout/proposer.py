"""History drafting inside a vLLM worker, as a speculator of method `custom_class` (vLLM 0.32).

vLLM builds the class with its own config alone and calls `propose` without request ids, so the
worker's extension binds it to its runner afterwards. What it must know of a request travels in
`SamplingParams.extra_args`. What compiles with numba is imported when it is bound: vLLM's CPU start
looks through every module that is loaded, and fails over some of numba's.
"""

import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.config import VllmConfig

from engines.histospec.step_times import MeasuredStepTimes
from schemas.config import EngineConfig
from schemas.latency import Profile

if TYPE_CHECKING:
    from engines.histospec.drafter import DraftedRequest, HistoryDrafter
    from engines.histospec.gate import StepTimes

_SIBLING_BYTES = 2**28
PROMPT_KEY = "prompt_key"
"""Name of the prompt's key in `SamplingParams.extra_args`."""


class HistoryProposer:
    """Proposes nothing until it is bound."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        scheduler = vllm_config.scheduler_config
        self._max_num_requests = scheduler.max_num_seqs
        self._max_step_tokens = (
            scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        )
        self._runner: Any = None
        self._drafter: HistoryDrafter | None = None
        self._measured: MeasuredStepTimes | None = None
        self._ids: list[str] = []
        self._places = np.zeros(0, np.int64)

    def load_model(self, *_: Any) -> None:
        """There is none."""

    def bind(self, runner: Any, config: EngineConfig, engine: int) -> None:
        from engines.histospec.drafter import HistoryDrafter
        from engines.histospec.gate import Gate
        from engines.histospec.siblings import SiblingIndex
        from engines.histospec.window import window_policy

        self._runner = runner
        # Else all drafts are skipped while one request is within a draft of the context's end.
        runner.effective_drafter_max_model_len = sys.maxsize
        drafting = config.drafting
        self._drafter = HistoryDrafter(
            Path(config.history_dir),
            window_policy(drafting.window, drafting.max_draft),
            Gate(self._step_times(config) if drafting.gate else None),
            self._max_num_requests,
            SiblingIndex(max_match=drafting.max_match, max_bytes=_SIBLING_BYTES)
            if drafting.siblings
            else None,
        )
        self._state_file = Path(config.history_dir) / f"engine-{engine}.json"
        self._restore()

    def take_counts(self) -> dict[str, float]:
        """Also writes down what was learnt, so that a restart begins with it."""
        assert self._drafter is not None
        self._save()
        return asdict(self._drafter.take_counts())

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """vLLM's call after each step: drafts for the rows of the batch, each 0..k tokens."""
        del slot_mappings
        num_rows = len(sampled_token_ids)
        if self._drafter is None:
            return [[] for _ in range(num_rows)]
        started_s = time.perf_counter()
        joined = self._follow_rows(self._runner.input_batch.req_ids[:num_rows])
        num_tokens = num_tokens_no_spec[:num_rows].astype(np.int32)
        if self._measured:
            self._measured.step_ended(started_s, num_rows, joined)
        drafts = self._drafter.propose(
            self._places,
            np.fromiter(map(len, sampled_token_ids), np.int32, num_rows),
            token_ids_cpu[:num_rows],
            num_tokens,
            self._max_step_tokens - num_rows,
        )
        if self._measured:
            sizes = np.fromiter(map(len, drafts), np.int32, num_rows)
            self._measured.step_begins(time.perf_counter(), float(num_tokens.sum()), sizes)
        return drafts

    def _follow_rows(self, ids: list[str]) -> bool:
        """Whether rows have joined that were not there in the step before."""
        if ids == self._ids:
            return False
        drafter = self._drafter
        assert drafter is not None
        drafter.end_others(ids)
        new = [id for id in ids if not drafter.knows(id)]
        for id in new:
            drafter.begin(self._describe(id))
        self._ids = list(ids)
        self._places = drafter.places(ids)
        return bool(new)

    def _restore(self) -> None:
        assert self._drafter is not None
        # What was learnt is worth a few seconds of speed: without it, or with what another version
        # or a crash has left, learning begins anew.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads(self._state_file.read_text())
            self._drafter.acceptance.restore(state["acceptance"])
            if self._measured:
                self._measured.restore(state["step_times"])

    def _save(self) -> None:
        assert self._drafter is not None
        state = {
            "acceptance": self._drafter.acceptance.state(),
            "step_times": self._measured.state() if self._measured else None,
        }
        temporary = self._state_file.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(state))
            temporary.replace(self._state_file)

    def _describe(self, id: str) -> "DraftedRequest":
        from engines.histospec.drafter import DraftedRequest

        state = self._runner.requests[id]
        params = state.sampling_params
        key = (params.extra_args or {}).get(PROMPT_KEY, "")
        num_prompt_tokens = state.num_prompt_tokens
        max_tokens = num_prompt_tokens + (params.max_tokens or 0)
        return DraftedRequest(id, key, max_tokens, num_prompt_tokens)

    def _step_times(self, config: EngineConfig) -> "StepTimes":
        if config.profile_json is None:
            self._measured = MeasuredStepTimes()
            return self._measured
        from engines.histospec.gate import ProfiledStepTimes
        from engines.latency.fitted import FittedLatency

        latency = FittedLatency(Profile.model_validate_json(config.profile_json))
        return ProfiledStepTimes(latency, config.rollout.tp_degree)
