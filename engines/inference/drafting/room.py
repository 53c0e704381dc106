"""How many draft tokens each step verifies, decided beside vLLM's scheduler (vLLM 0.32, V2 runner).

The device drafts after each step (`device_drafter`), and the next step is scheduled before. So the
scheduler reserves room for drafts that it does not know:

    step ends      how many draft tokens of each request were right: a share per request
    schedule       probability of each draft token by that share ─► Gate ─► room

A new request begins with the share of all requests of its kind: those whose prompt has an index,
those that have the shared indexes alone, and those that have a draft head alone.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from refrain.engines.histospec.budget import keep_likeliest, max_draft_tokens
from refrain.engines.histospec.index_file import index_path, shared_dir
from refrain.engines.histospec.step_times import pass_content
from refrain.engines.inference.drafting.gating import max_step_tokens, times_and_gate
from refrain.engines.inference.engine.extra_args import PROMPT_KEY
from refrain.schemas.config import EngineConfig
from refrain.schemas.engine import EngineSetup

RECORD_TOKENS, KIND_TOKENS = 64, 1024
"""Draft tokens that the record of a request and that of a kind cover."""
PRIOR_TOKENS = 8.0
"""Draft tokens that a kind counts as in the record of a new request."""
FORGET = 1.0 - 2.0**-10
"""Weight that the record of a kind keeps from step to step. So drafts that did not pay are tried
again some day."""


@dataclass(slots=True)
class _Record:
    """Draft tokens that were compared with the response, and how many of them were right."""

    most: float
    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, tried: int) -> None:
        kept = min(1.0, max(0.0, self.most - tried) / max(self.tried, 1.0))
        self.right, self.tried = self.right * kept + right, self.tried * kept + tried

    def share(self, prior: float, weight: float) -> float:
        return (self.right + prior * weight) / (self.tried + weight)


@dataclass(slots=True)
class _Kind:
    record: _Record = field(default_factory=lambda: _Record(KIND_TOKENS))

    @property
    def share(self) -> float:
        """Return an upper bound of the share of right tokens: what is little known is tried."""
        mean, num = self.record.share(0.5, 2.0), self.record.tried + 2.0
        return min(0.98, mean + sqrt(mean * (1.0 - mean) / num))


def _decodes(request: Any) -> bool:
    """Whether the next step of a request draws a token after one that was drawn before."""
    return request.num_output_tokens > 0 and not request.is_prefill_chunk


OWN, SHARED, HEADED, NONE = "own", "shared", "head", ""


class DraftRoom:
    """Reserves room for drafts in the steps of one engine."""

    def __init__(
        self,
        requests: Mapping[str, Any],
        vllm_config: Any,
        config: EngineConfig,
        setup: EngineSetup,
    ) -> None:
        """`requests`: vLLM's state of each request by its id there. It changes while they run."""
        drafting = config.drafting
        self._requests = requests
        self._directory = Path(config.history_dir)
        self._is_on, self._shares = drafting.enabled, drafting.shared_tokens > 0
        self._has_head = config.specactor.head is not None
        self._max_step_tokens = max_step_tokens(vllm_config)
        self._measured, self._gate = times_and_gate(config, setup)
        self._window = vllm_config.num_speculative_tokens
        of_head = min(self._window, config.specactor.window) if self._has_head else 0
        of_history = max(min(self._window, drafting.max_draft), of_head)
        self._longest = {OWN: of_history, SHARED: of_history, HEADED: of_head}
        """Longest draft of each kind."""
        self._rooms = [[-1] * num for num in range(self._window + 1)]
        """Placeholders for each number of tokens to verify."""
        self._kinds = {OWN: _Kind(), SHARED: _Kind(), HEADED: _Kind()}
        self._records: dict[str, tuple[str, _Record]] = {}
        """Kind and record of each request that may have drafts."""
        self._num_verified = 0
        self._contents: dict[int, np.ndarray] = {}
        """Content of each running step, by the identity of its `SchedulerOutput`."""
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._restore(setup.learnt)

    def begin(self, request: Any) -> None:
        """A request was submitted."""
        kind = self._kind_of((request.sampling_params.extra_args or {}).get(PROMPT_KEY, ""))
        if kind != NONE:
            self._records[request.request_id] = kind, _Record(RECORD_TOKENS)

    def reserve(self, running: Sequence[Any]) -> None:
        """Before a step is scheduled: reserve room for drafts in vLLM's running requests."""
        rows = [r for r in running if r.request_id in self._records and _decodes(r)]
        room = dict.fromkeys((r.request_id for r in running), 0)
        if rows and not self._measured.plain_is_due(time.perf_counter()):
            num = self._num_paying(rows, len(running)).tolist()
            room |= {row.request_id: one for row, one in zip(rows, num, strict=True)}
        for request in running:
            request.spec_token_ids = self._rooms[room[request.request_id]]

    def scheduled(self, step: Any) -> None:
        """After a step was scheduled."""
        self._counts["num_steps"] += 1
        self._counts["num_drafting_steps"] += bool(step.scheduled_spec_decode_tokens)
        known = ((num, self._requests.get(id)) for id, num in step.num_scheduled_tokens.items())
        rows = [
            (num, one.num_computed_tokens - num, one.num_prompt_tokens) for num, one in known if one
        ]
        self._contents[id(step)] = pass_content(*np.array(rows, np.int64).reshape(-1, 3).T)

    def updated(self, step: Any, sampled: Sequence[Sequence[int]], rows: Mapping[str, int]) -> None:
        """After a step has ended: learn from it.

        `sampled`: tokens that the step has drawn. `rows`: where those of each request are.
        """
        now_s = time.perf_counter()
        if (content := self._contents.pop(id(step), None)) is not None:
            self._measured.pass_ended(now_s, content)
        self._measured.pass_begins(now_s)
        for kind in self._kinds.values():
            kind.record.tried *= FORGET
            kind.record.right *= FORGET
        for one, drafts in step.scheduled_spec_decode_tokens.items():
            if one in self._records and (tokens := sampled[rows[one]]):
                kind, record = self._records[one]
                right = len(tokens) - 1
                tried = min(right + 1, len(drafts))
                record.add(right, tried)
                self._kinds[kind].record.add(right, tried)
                self._num_verified += tried
        for id_ in self._records.keys() - self._requests.keys():
            del self._records[id_]

    def take_counts(self) -> dict[str, Any]:
        """Return the counts since the last call, and the learnt state for a successor."""
        counts: dict[str, Any] = dict(self._counts) | self._measured.take()
        counts |= {"step_costs": self._measured.costs, "plain_error": self._measured.plain_error}
        self._counts.clear()
        kinds = {name: (kind.record.right, kind.record.tried) for name, kind in self._kinds.items()}
        state = {
            "gate": self._gate.state(), "step_times": self._measured.state(), "kinds": kinds
        }  # fmt: skip
        return counts | {"learnt": json.dumps(state)}

    def _num_paying(self, rows: Sequence[Any], num_running: int) -> np.ndarray:
        """Return how many draft tokens of each request to verify; int32 [rows]."""
        nothing = np.zeros(len(rows), np.int32)
        if not self._gate.looks(len(rows)):
            return nothing
        records = [self._records[row.request_id] for row in rows]
        shares = np.array(
            [record.share(self._kinds[kind].share, PRIOR_TOKENS) for kind, record in records]
        )
        # A verification emits one token more than it accepts.
        left = [
            row.num_prompt_tokens + row.max_tokens - row.num_tokens - row.num_output_placeholders
            for row in rows
        ]
        longest = [self._longest[kind] for kind, _ in records]
        most = np.clip(np.array(left) - 1, 0, longest).astype(np.int32)
        columns = np.arange(self._window)
        drafted = columns < most[:, None]
        probabilities = np.where(drafted, shares[:, None] ** (columns + 1), 0.0)
        context = float(sum(row.num_computed_tokens for row in rows))
        paying = self._gate.keep(probabilities, most, context, self._num_verified)
        budget = max_draft_tokens(self._max_step_tokens, num_running)
        return keep_likeliest(probabilities, paying, budget)

    def _kind_of(self, key: str) -> str:
        if self._is_on and key:
            if index_path(self._directory, key).exists():
                return OWN
            if self._shares and self._has_shared():
                return SHARED
        return HEADED if self._has_head else NONE

    def _has_shared(self) -> bool:
        """Whether a shared index exists. Stop at the first one: this runs for each request."""
        with suppress(FileNotFoundError), os.scandir(shared_dir(self._directory)) as files:
            return any(file.name.endswith(".index") for file in files)
        return False

    def _restore(self, learnt: str) -> None:
        # The learnt state saves a few seconds only. If it is absent or from another version of
        # refrain, start without it.
        with suppress(ValueError, KeyError, TypeError):
            state = json.loads(learnt)
            self._gate.restore(state["gate"])
            self._measured.restore(state["step_times"])
            for name, (right, tried) in state["kinds"].items():
                record = self._kinds[name].record
                record.right, record.tried = float(right), float(tried)
