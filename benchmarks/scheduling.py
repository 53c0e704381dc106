"""vLLM's schedulers without a model, driven as vLLM's engine core drives them.

    schedule ─► FakeRunner ─► queue (async: the next step is scheduled first) ─► update_from_output

A token is a function of its request and position, so each schedule gives the same tokens.
"""

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

MODEL = Path(__file__).parents[1] / "infra" / "demo" / "model"
BLOCK_TOKENS = 16
STOP_TOKEN, VOCAB_SIZE = 1, 50_000


def token_of(id: str, position: int, stops: int = 0) -> int:
    """Return the token of a request at a position. One in `stops` is `STOP_TOKEN`, if not 0."""
    value = zlib.crc32(f"{id}/{position}".encode())
    return STOP_TOKEN if stops and value % stops == 0 else 2 + value % (VOCAB_SIZE - 2)


@contextmanager
def model_runner(version: int) -> Iterator[None]:
    """Let vLLM use this version of its model runner, 1 or 2."""
    with patch.dict(os.environ, {"VLLM_USE_V2_MODEL_RUNNER": str(version - 1)}):
        yield


def vllm_config(*, is_async: bool, max_draft: int = 0, **args: Any) -> Any:
    """Return vLLM's configuration of an engine. `args`: further arguments of `EngineArgs`.

    Only the V2 model runner takes drafts in asynchronous steps. See `model_runner`.
    """
    from vllm import EngineArgs, envs

    if max_draft:
        method = {
            "method": "custom_class",
            "model": "refrain.engines.inference.engine.plugin.NoDrafts",
        }
        if envs.VLLM_USE_V2_MODEL_RUNNER:
            method = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        args["speculative_config"] = {**method, "num_speculative_tokens": max_draft}
        args["per_request_spec_decode_metrics"] = "detailed"
    args.setdefault("max_num_batched_tokens", 8192)
    engine_args = EngineArgs(
        model=str(MODEL), dtype="float32", block_size=BLOCK_TOKENS, disable_log_stats=True,
        enable_prefix_caching=True, **args,
    )  # fmt: skip
    # The V2 model runner needs Triton, but nothing runs here.
    with patch("vllm.config.vllm.HAS_TRITON", True):
        config = engine_args.create_engine_config()
    # vLLM switches it off on a CPU.
    config.scheduler_config.async_scheduling = is_async
    return config


def make_scheduler(kind: Callable[..., Any], config: Any, num_blocks: int) -> Any:
    """Return a scheduler of this class, for a model with one kind of attention."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    config.cache_config.num_gpu_blocks = num_blocks
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=False,
    )  # fmt: skip


def make_request(
    id: str, prompt: Iterable[int], max_tokens: int, *, priority: int = 0, **params: Any
) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    kind = RequestOutputKind.FINAL_ONLY
    given = SamplingParams(max_tokens=max_tokens, logprobs=0, output_kind=kind, **params)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    return Request(id, list(prompt), given, None, block_hasher=hasher, priority=priority)


@dataclass
class FakeRunner:
    """What vLLM's model runner knows of requests, and the tokens that it would draw.

    `draft`: returns the drafts of a request that has this many tokens. If the scheduler gives
    placeholders, like for vLLM's V2 model runner, they are replaced by as many drafts.
    `scores_rejected`: whether rejected drafts have log-probabilities, like in the V2 model runner.
    """

    stops: int = 0
    draft: Callable[[str, int], list[int]] = lambda *_: []
    scores_rejected: bool = False
    num_tokens: dict[str, int] = field(default_factory=dict)

    def run(self, step: Any) -> Any:
        """Return vLLM's `ModelRunnerOutput` of a step."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        for id in step.finished_req_ids:
            self.num_tokens.pop(id, None)
        cached = step.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.num_tokens |= {id: len(tokens) for id, tokens in cached.all_token_ids.items()}
        for new in step.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self.num_tokens[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
        ids = list(step.num_scheduled_tokens)
        drawn = [self._draw(id, computed[id], step) for id in ids]
        scored = [self._scored(id, tokens, step) for id, tokens in zip(ids, drawn, strict=True)]
        flat = [token for tokens in scored for token in tokens]
        columns = np.array(flat, np.int32)[:, None]
        ragged = any(len(tokens) != 1 for tokens in scored)
        starts = np.cumsum([0, *map(len, scored)]).tolist() if ragged else None
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: row for row, id in enumerate(ids)},
            sampled_token_ids=drawn,
            logprobs=LogprobsLists(columns, -columns.astype(np.float32), columns[:, 0], starts),
            prompt_logprobs_dict={},
            pooler_output=[],
            num_nans_in_logits={},
        )

    def _draw(self, id: str, computed: int, step: Any) -> list[int]:
        drafts = step.scheduled_spec_decode_tokens.get(id, [])
        known = self.num_tokens[id]
        if -1 in drafts:
            drafts = (self.draft(id, known) + drafts)[: len(drafts)]
        if computed + step.num_scheduled_tokens[id] - len(drafts) < known:
            return []
        drawn = []
        for draft in [*drafts, None]:
            drawn.append(token_of(id, known + len(drawn), self.stops))
            if drawn[-1] != draft:
                break
        self.num_tokens[id] += len(drawn)
        return drawn

    def _scored(self, id: str, tokens: list[int], step: Any) -> list[int]:
        """Return the tokens of a request that have log-probabilities."""
        if not self.scores_rejected:
            return tokens
        num_rows = 1 + len(step.scheduled_spec_decode_tokens.get(id, ()))
        return tokens + [0] * (num_rows - len(tokens))

    def drafts(self, step: Any) -> Any:
        """Return vLLM's `DraftTokenIds` after a step."""
        from vllm.v1.outputs import DraftTokenIds

        ids = list(step.num_scheduled_tokens)
        return DraftTokenIds(ids, [self.draft(id, self.num_tokens[id]) for id in ids])


class Core:
    """Runs a scheduler and a runner, like vLLM's `EngineCore`.

    `num_drafts`: returns the number of drafts of a request with this many tokens in the next
    asynchronous step. By default each request has as many as vLLM allows.
    """

    def __init__(
        self,
        scheduler: Any,
        runner: FakeRunner,
        num_drafts: Callable[[str, int], int] | None = None,
    ) -> None:
        self.scheduler, self._runner = scheduler, runner
        config = scheduler.vllm_config
        is_async, drafts = config.scheduler_config.async_scheduling, config.speculative_config
        self._depth = 2 if is_async else 1
        self._updates_drafts = bool(drafts and not is_async)
        self._num_drafts = num_drafts if drafts and is_async else None
        self._queue: deque[tuple[Any, Any]] = deque()

    def step(self) -> tuple[Any, list[Any]]:
        """Schedule a step and finish the oldest. Return the scheduled step and the outputs."""
        if self._num_drafts is not None:
            for request in self.scheduler.running:
                if not request.is_prefill_chunk:
                    num = self._num_drafts(request.request_id, request.num_tokens)
                    request.spec_token_ids = [-1] * num
        step = self.scheduler.schedule()
        if step.total_num_scheduled_tokens or not self._queue:
            self._queue.append((step, self._runner.run(step)))
        if len(self._queue) < self._depth and step.total_num_scheduled_tokens:
            return step, []
        ran, output = self._queue.popleft()
        steps = self.scheduler.update_from_output(ran, output)
        if self._updates_drafts and ran.total_num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(self._runner.drafts(ran))
        return step, [one for told in steps.values() for one in told.outputs]
