"""What drafting keeps for one vLLM engine, wherever it runs: in the worker (`proposer`) or beside
the scheduler (`ahead`).

vLLM's state of a request says which prompt it has; `SamplingParams.extra_args` carries what vLLM
does not know. Import this module only after vLLM has started, because it uses numba (see
`NoDrafts`).
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.histospec.drafter import DraftedRequest, HistoryDrafter
from engines.histospec.drafting import NO_KEY
from engines.histospec.gate import Gate, ProfiledStepTimes, StepTimes
from engines.histospec.siblings import SiblingIndex
from engines.histospec.step_times import MeasuredStepTimes
from engines.histospec.window import window_policy
from engines.inference.sampling.drawing import SAMPLE_KEY
from engines.inference.sampling.step_rows import GREEDY_BELOW
from engines.latency.fitted import FittedLatency
from schemas.config import EngineConfig
from schemas.engine import EngineSetup
from schemas.latency import Profile

_SIBLING_BYTES = 2**28
PLAIN_SHARE = 1 / 16
"""Share of the time in which engines without a profile draft nothing: it shows how long a pass
without drafts takes, and so what drafting saves."""
PROMPT_KEY = "prompt_key"
"""Key of the prompt key in `SamplingParams.extra_args`."""


class EngineDrafting:
    """The history drafter of an engine, the times of its passes, and its counts."""

    def __init__(
        self,
        requests: Mapping[str, Any],
        vllm_config: Any,
        config: EngineConfig,
        setup: EngineSetup,
    ) -> None:
        """`requests`: vLLM's state of each request by its id there. It changes while they run."""
        scheduler, drafting = vllm_config.scheduler_config, config.drafting
        self._requests = requests
        self._max_step_tokens = (
            scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        )
        profile = setup.profile_json
        self._measured = MeasuredStepTimes(0.0 if profile else PLAIN_SHARE)
        times: StepTimes = self._measured
        if profile:
            latency = FittedLatency(Profile.model_validate_json(profile))
            times = ProfiledStepTimes(latency, config.rollout.tp_degree)
        self._history_is_on, self._foresees = drafting.enabled, drafting.look_ahead
        self._history = HistoryDrafter(
            Path(config.history_dir),
            window_policy(drafting.window, drafting.max_draft),
            Gate(times if drafting.gate else None),
            scheduler.max_num_seqs,
            SiblingIndex(max_bytes=_SIBLING_BYTES) if drafting.siblings else None,
            shares=drafting.shared_tokens > 0,
        )
        self._draft_s = 0.0
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

    def expect(self, prompt_keys: Sequence[str]) -> None:
        """Open the indexes of these prompts in a thread: requests for them are on their way."""
        if self._history_is_on:
            self._history.expect(prompt_keys)

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
        return self._requests[id].sampling_params.extra_args or {}

    def _describe(self, id: str) -> DraftedRequest:
        """Describe a request for the history drafter. A canary has no prompt key."""
        state = self._requests[id]
        key = self._extra_args(id).get(PROMPT_KEY, "") if self._history_is_on else ""
        max_tokens = state.num_prompt_tokens + (state.sampling_params.max_tokens or 0)
        return DraftedRequest(
            id, key, max_tokens, state.num_prompt_tokens, self._foreseen_key(id) if key else NO_KEY
        )

    def _foreseen_key(self, id: str) -> int:
        """Return the sample key, or NO_KEY if noise must not guide the request's drafts."""
        params = self._requests[id].sampling_params
        drawn = self._foresees and params.temperature >= GREEDY_BELOW
        return self._extra_args(id)[SAMPLE_KEY] if drawn else NO_KEY
