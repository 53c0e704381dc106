"""Record which experts the routers of a mixture chose for each token (vLLM 0.32, V1 runner).

    forward pass   each router writes its choice               `StepExperts`
    after it       the choices go to the slots of the step's   `ExpertRecorder`
                   tokens in the KV cache
    sampled        new positions travel with the new tokens    `ExpertRows`, in the scheduler

Positions of the prompt that were in the prefix cache have the experts of the pass that computed
their keys and values. Rejected drafts leave no trace: the tokens in their place overwrite them. A
recorded value is the number of the expert plus one. 0 means unknown, for example where keys and
values came from another engine.

vLLM's own capturer supports its V2 runner alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.kv_cache_interface import FullAttentionSpec

from refrain.schemas.rollout import MAX_EXPERTS


class StepExperts:
    """The experts of the last forward pass, uint8 [tokens, layers, top_k] on the model's device."""

    def __init__(self, runner: Any) -> None:
        """Connect to the routers of a runner's model. On a GPU call this before vLLM captures CUDA
        graphs, which then contain the writes. Raise ValueError if a router cannot be recorded."""
        routers = _routers_of(runner.model)
        shape = (runner.max_num_tokens, len(routers), routers[0].top_k)
        self._experts = torch.zeros(shape, dtype=torch.uint8, device=runner.device)
        for layer, router in enumerate(routers):
            router.set_capture_fn(_Writer(self._experts, layer))

    def forget(self) -> None:
        """Make all experts unknown, so that those of an earlier pass cannot stay."""
        self._experts.zero_()

    def of_first(self, num_tokens: int) -> NDArray[np.uint8]:
        """Return a copy of the experts of the pass's first tokens."""
        return self._experts[:num_tokens].cpu().numpy().copy()


@dataclass(frozen=True, slots=True)
class _Writer:
    experts: Tensor
    layer: int

    def __call__(self, topk_ids: Tensor) -> None:
        self.experts[: len(topk_ids), self.layer] = topk_ids + 1


def _routers_of(model: Any) -> list[BaseRouter]:
    mixtures = [module for module in model.modules() if isinstance(module, MoERunner)]
    if not mixtures:
        raise ValueError(f"{type(model).__name__} has no experts to record")
    routers = [mixture.router for mixture in mixtures]
    for mixture, router in zip(mixtures, routers, strict=True):
        if not isinstance(router, BaseRouter) or mixture.routed_experts.quant_method.is_monolithic:
            raise ValueError(
                f"{type(model).__name__}: vLLM chooses experts inside a kernel here, so they "
                "cannot be recorded. Set trainer.routing_replay: false"
            )
    shapes = {(router.top_k, router.global_num_experts) for router in routers}
    if len(shapes) > 1 or max(num for _, num in shapes) > MAX_EXPERTS:
        raise ValueError(
            f"{type(model).__name__} has layers with (top_k, experts) {sorted(shapes)}: all must "
            f"be equal, with at most {MAX_EXPERTS} experts. Set trainer.routing_replay: false"
        )
    return routers


class ExpertRecorder:
    """Adds the experts of new positions to the outputs of a V1 runner's steps."""

    def __init__(self, runner: Any, step: StepExperts) -> None:
        """Record from now on. Call once, after the KV cache was made and before the first
        request."""
        self._runner, self._step = runner, step
        groups = runner.kv_cache_config.kv_cache_groups
        full = [
            i for i, one in enumerate(groups) if isinstance(one.kv_cache_spec, FullAttentionSpec)
        ]
        if not full:
            raise ValueError(
                "experts are recorded by slot of the KV cache, and this model has no full "
                "attention, whose slots stay. Set trainer.routing_replay: false"
            )
        self._group = full[0]
        self._block_size = groups[self._group].kv_cache_spec.block_size
        shape = step.of_first(1).shape[1:]
        blocks = runner.kv_cache_config.num_blocks
        self._kept = np.zeros((blocks * self._block_size, *shape), np.uint8)
        """The experts of each slot."""
        self._rows: list[_Row] = []
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._executed, self._sampled

    def _executed(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._step.forget()
        for block in _loaded_blocks(scheduler_output):
            self._kept[block * self._block_size : (block + 1) * self._block_size] = 0
        output = self._execute(scheduler_output, *args, **kwargs)
        # A step without tokens leaves the batch as it was, and nothing is sampled.
        self._rows = list(self._rows_of(scheduler_output)) if output is None else []
        return output

    def _sampled(self, *args: Any, **kwargs: Any) -> Any:
        output = self._sample(*args, **kwargs)
        if self._rows:
            # An asynchronous output has the one to fill in.
            target = output if hasattr(output, "req_ids") else output._model_runner_output
            target.aux_output_connector_output = self._outputs()
        return output

    def _rows_of(self, step: Any) -> "Iterator[_Row]":
        """Yield the requests of a step in the order of their tokens."""
        batch, cached = self._runner.input_batch, step.scheduled_cached_reqs
        num_output = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        for row, id in enumerate(batch.req_ids[: batch.num_reqs]):
            yield _Row(
                id=id,
                start=int(batch.num_computed_tokens_cpu[row]),
                num=step.num_scheduled_tokens[id],
                num_drafts=len(step.scheduled_spec_decode_tokens.get(id, ())),
                # Requests that are new to the runner are not among the cached ones.
                is_first=not num_output.get(id),
                num_prompt=self._runner.requests[id].num_prompt_tokens,
                slots=self._slots(row, step.num_scheduled_tokens[id]),
            )

    def _slots(self, row: int, num: int) -> NDArray[np.int64]:
        """Return the slots of a request's tokens up to the last one of this step."""
        batch = self._runner.input_batch
        table = batch.block_table[self._group]
        positions = np.arange(int(batch.num_computed_tokens_cpu[row]) + num)
        blocks = table.block_table.np[row, positions // table.block_size].astype(np.int64)
        return blocks * table.block_size + positions % table.block_size

    def _outputs(self) -> dict[str, AuxRequestOutput]:
        """Return the experts of the positions that the sampled tokens may add to each request."""
        rows, at = self._rows, 0
        chosen = self._step.of_first(sum(row.num for row in rows))
        # First all, because a request may use blocks of the cache that this step has filled.
        self._kept[np.concatenate([row.slots[row.start :] for row in rows])] = chosen
        outputs = {}
        for row in rows:
            own = chosen[at : at + row.num]
            at += row.num
            if not row.is_first:
                first = row.num - 1 - row.num_drafts
                outputs[row.id] = AuxRequestOutput(row.start + first, own[first:])
            elif row.start + row.num >= row.num_prompt:
                outputs[row.id] = AuxRequestOutput(0, self._kept[row.slots])
        return outputs


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens of one request in a step."""

    id: str
    start: int
    num: int
    num_drafts: int
    is_first: bool
    """Whether no token was sampled for it on this engine yet."""
    num_prompt: int
    slots: NDArray[np.int64]
    """Of its tokens up to `start` + `num`."""


def _loaded_blocks(step: Any) -> Iterator[int]:
    """Yield the blocks whose keys and values come from another engine."""
    if step.kv_connector_metadata is not None:
        for load in step.kv_connector_metadata.loads:
            yield from load.blocks


class ExpertRows:
    """Takes experts out of a step's output, where vLLM's V1 scheduler asks for auxiliary ones."""

    def take_output(
        self, request: Any, output: dict[str, AuxRequestOutput] | None
    ) -> NDArray[np.uint8]:
        """Return the experts of the positions that the request's new tokens have added, uint8
        [positions, layers, top_k]. The last token has none yet."""
        assert output is not None
        own = output[request.request_id]
        return own.rows[: request.num_tokens - 1 - own.token_start]

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> None:
        """Return nothing: the worker needs no metadata."""

    def request_finished(self, request: Any) -> None:
        """Do nothing: this keeps no state of a request."""

    def reset(self) -> None:
        """Do nothing, for the same reason."""
