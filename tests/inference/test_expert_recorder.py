"""The front end gets the experts of every position, whatever the steps in which it was computed.

A fake forward pass chooses experts that name the position and its token, so a row of a rejected
draft, of another request or of another position would show. vLLM's scheduler and ours, the recorder
and the prefix cache are real.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from refrain.benchmarks.scheduling import (
    BLOCK_TOKENS,
    Core,
    FakeRunner,
    make_request,
    make_scheduler,
    model_runner,
    token_of,
    vllm_config,
)
from tests.inference.test_decode_steps import MAX_DRAFT, MAX_ROWS, STOPS, TIGHT, drafted, kinds

pytestmark = pytest.mark.engine
ONCE, AGAIN = 1, 2
"""Third expert: whether the pass computes a token of the response for the first time."""


@dataclass
class Pass:
    """Fake of `StepExperts`."""

    experts: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((1, 1, 3), np.uint8))

    def forget(self) -> None:
        self.experts = np.zeros((1, 1, 3), np.uint8)

    def of_first(self, num_tokens: int) -> NDArray[np.uint8]:
        return self.experts[:num_tokens].copy()


def experts_at(position: int, token: int, kind: int) -> tuple[int, int, int]:
    return position % 251 + 1, token % 241 + 1, kind


class RoutedRunner(FakeRunner):
    """Fake of vLLM's V1 runner with blocks, batch and experts."""

    def __init__(self, num_blocks: int, drafts: bool) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        super().__init__(STOPS, drafted if drafts else lambda *_: [])
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        group = SimpleNamespace(kv_cache_spec=spec)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=num_blocks)
        self.step_experts = Pass()
        self.requests: dict[str, Any] = {}
        self.blocks: dict[str, list[int]] = {}

    def run(self, step: Any) -> Any:
        return output if (output := self.execute_model(step)) is not None else self.sample_tokens()

    def execute_model(self, step: Any) -> Any:
        self._step, cached = step, step.scheduled_cached_reqs
        for new in step.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids)
            request = SimpleNamespace(num_prompt_tokens=len(prompt), prompt=prompt)
            self.requests[new.req_id] = request
            self.blocks[new.req_id] = list(new.block_ids[0])
        for id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if id in cached.resumed_req_ids:
                self.blocks[id] = []
            self.blocks[id] += blocks[0] if blocks else []
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        if not step.total_num_scheduled_tokens:
            return super().run(step)
        ids = list(step.num_scheduled_tokens)
        table = np.zeros((len(ids), max(len(self.blocks[id]) for id in ids)), np.int32)
        for row, id in enumerate(ids):
            table[row, : len(self.blocks[id])] = self.blocks[id]
        block_table = SimpleNamespace(
            block_table=SimpleNamespace(np=table), block_size=BLOCK_TOKENS
        )
        self.input_batch = SimpleNamespace(
            req_ids=ids,
            num_reqs=len(ids),
            num_computed_tokens_cpu=np.array([computed[id] for id in ids]),
            block_table=[block_table],
        )
        self._known = {id: self.num_tokens.get(id, 0) for id in ids}
        rows = [row for id in ids for row in self._experts(id, computed[id])]
        self.step_experts.experts = np.array(rows, np.uint8)[:, None]
        return None

    def sample_tokens(self) -> Any:
        return super().run(self._step)

    def _experts(self, id: str, computed: int) -> list[tuple[int, int, int]]:
        step, prompt = self._step, self.requests[id].prompt
        drafts = step.scheduled_spec_decode_tokens.get(id, [])
        if -1 in drafts:  # As in `FakeRunner._draw`.
            drafts = (self.draft(id, self._known[id] or len(prompt)) + drafts)[: len(drafts)]
        end, rows = computed + step.num_scheduled_tokens[id], []
        for position in range(computed, end):
            if position < len(prompt):
                token = prompt[position]
            elif position >= end - len(drafts):
                token = drafts[position - end + len(drafts)]
            else:
                token = token_of(id, position, STOPS)
            is_known = len(prompt) <= position < self._known[id] - 1
            rows.append(experts_at(position, token, AGAIN if is_known else ONCE))
        return rows


@pytest.mark.parametrize(
    ("is_async", "drafts"),
    [(False, False), (False, True), (True, False)],
    ids=["sync", "drafts", "async"],
)
@pytest.mark.parametrize("seed", range(2))
def test_each_position_has_its_own_experts(seed: int, is_async: bool, drafts: bool) -> None:
    from refrain.engines.inference.engine.expert_recorder import ExpertRecorder

    config = vllm_config(
        is_async=is_async,
        max_draft=MAX_DRAFT if drafts else 0,
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=64,
    )
    with model_runner(1):
        scheduler = make_scheduler(kinds(is_async)[1], config, TIGHT)
    scheduler.record_experts()
    runner = RoutedRunner(TIGHT, drafts)
    ExpertRecorder(runner, runner.step_experts)
    core, rng = Core(scheduler, runner), random.Random(seed)
    prompts = [list(range(2, 2 + rng.randint(1, 6 * BLOCK_TOKENS))) for _ in range(4)]
    own: dict[str, list[int]] = {}
    tokens, experts = defaultdict(list), defaultdict(list)
    num_preempted = num_fast = num_checked = num_added = 0
    decode_step = scheduler._decode_step

    def counted() -> Any:
        nonlocal num_fast
        step = decode_step()
        num_fast += step is not None
        return step

    scheduler._decode_step = counted
    for i in range(300):
        if i < MAX_ROWS or rng.random() < 0.06:
            id, prompt = f"r{num_added}", rng.choice(prompts)
            scheduler.add_request(make_request(id, prompt, rng.randint(1, 150), stop_token_ids=[1]))
            own[id], num_added = prompt, num_added + 1
        step, outputs = core.step()
        num_preempted += len(step.preempted_req_ids or ())
        for output in outputs:
            id = output.request_id
            tokens[id] += output.new_token_ids
            experts[id].append(output.routed_experts)
            whole = own[id] + tokens[id]
            expected = [experts_at(p, token, ONCE) for p, token in enumerate(whole[:-1])]
            assert np.concatenate(experts[id])[:, 0].tolist() == list(map(list, expected))
            num_checked += output.finished
    assert num_checked > 10
    assert num_preempted > 0
    assert num_fast > 50


def test_experts_of_loaded_blocks_are_unknown() -> None:
    """Another engine computed their keys and values. Their last request here left its own."""
    from refrain.engines.inference.engine.expert_recorder import ExpertRecorder

    runner = RoutedRunner(TIGHT, drafts=False)
    recorder = ExpertRecorder(runner, runner.step_experts)
    recorder._kept[:] = 7
    load = SimpleNamespace(blocks=[3, 5])
    step = SimpleNamespace(
        kv_connector_metadata=SimpleNamespace(loads=[load]),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], all_token_ids={}
        ),
        finished_req_ids=set(),
        total_num_scheduled_tokens=0,
        num_scheduled_tokens={},
        scheduled_spec_decode_tokens={},
    )
    runner.execute_model(step)
    known = recorder._kept.reshape(TIGHT, -1).any(1)
    assert np.flatnonzero(~known).tolist() == [3, 5]
