"""Engines that answer the same prompts again and again, at a temperature that you can change.

    epoch 1 ─► index of its responses ─► epoch 2 ─► ...      one temperature, new noise each epoch

Engines of all kinds generate each epoch in turn. Their weights are those of the model directory.
"""

import shutil
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from refrain.benchmarks import one_step
from refrain.benchmarks.laps import Row, in_turn
from refrain.benchmarks.recorded import UNDRAFTED
from refrain.benchmarks.stock import StockEngine
from refrain.engines.bounded import wait_for
from refrain.engines.gpus.placement import Wanted
from refrain.engines.histospec.library import IndexLibrary, PromptHistory
from refrain.engines.histospec.shared import SharedLibrary
from refrain.engines.histospec.workers import BUILD_PROMPTS
from refrain.engines.inference.engine.checkpoint_engine import CheckpointEngine
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.rollout.coordinator import Coordinator
from refrain.schemas.config import EngineConfig, TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.drafting import HEAD, DraftingConfig
from refrain.schemas.engine import EngineSetup
from refrain.schemas.rollout import DraftSetting, RequestId
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.run.model_inputs import model_shape
from refrain.tasks.run.ray_cluster import ray_cluster

AS_IT_IS = PolicyWeights(policy_version=0, source=None, canaries=())
GPU_SHARE = 0.9
"""Share of the GPU's memory for all engines."""
CPU_KV_BYTES = 2 * 2**30
"""Largest KV cache of an engine on a CPU."""
WARM_UP_TOKENS = 8
SWITCH_S = 60.0
"""Longest time for an engine to change its temperature."""


class DialEngine(CheckpointEngine):
    """An engine with the model's own weights and a temperature that can change."""

    async def load_weights(self, weights: PolicyWeights) -> float:
        await self._llm.reset_prefix_cache()
        return await super().load_weights(weights)

    async def set_temperature(self, temperature: float) -> None:
        """Sample at `temperature` from now on, with a drafter that has learnt nothing yet."""
        rollout = self._config.rollout.model_copy(update={"temperature": temperature})
        self._config = self._config.model_copy(update={"rollout": rollout})
        if self._config.speculates:
            given = self._config.model_dump_json(), self._setup.model_dump_json(), self.index
            await self._llm.collective_rpc("begin_drafting", args=given)


class StockDialEngine(DialEngine, StockEngine):
    """Stock vLLM, which gets all requests at once."""

    in_batches = True


KINDS: dict[str, tuple[type[VLLMEngine], DraftingConfig]] = {
    "stock": (StockDialEngine, UNDRAFTED),
    "off": (DialEngine, UNDRAFTED),
    "on": (DialEngine, DraftingConfig()),
    "head": (DialEngine, DraftingConfig()),
}
DRAFTING = ("on", "head")
"""Engines that draft."""


@dataclass(frozen=True)
class DialTurn:
    """A lap of one engine."""

    engine: str
    temperature: float
    epoch: int
    """Number of the epoch, from 1."""
    number: int
    lap: one_step.Lap

    def row(self) -> Row:
        """Return the lap's figures; shares are of all tokens."""
        counts = self.lap.counts
        num_tokens = counts["num_tokens"]
        logprobs = [one.generated.inference_logprobs for one in self.lap.rollouts]
        row = {
            "engine": self.engine,
            "temperature": self.temperature,
            "epoch": self.epoch,
            "lap": self.number,
            "seconds": self.lap.seconds,
            "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / self.lap.seconds,
            "nats": -fmean(value for one in logprobs for value in one),
        }
        return row | (self._drafted(num_tokens) if self.engine in DRAFTING else {})

    def _drafted(self, num_tokens: int) -> Row:
        (share,) = self.lap.outcome.shares
        counts, drafting = self.lap.counts, share.drafting
        accepted = counts["num_accepted_tokens"]
        shared = drafting.num_shared_accepted_tokens
        verifications = max(1, counts["num_verifications"])
        return {
            "acceptance_rate": accepted / max(1, counts["num_draft_tokens"]),
            "acceptance_length": 1.0 + accepted / verifications,
            "speculation_rate": accepted / num_tokens,
            "own": (accepted - shared) / num_tokens,
            "shared": shared / num_tokens,
            "gated": 1.0 - drafting.num_drafting_steps / max(1, drafting.num_steps),
            "draft_s": drafting.draft_s,
        }


@dataclass(frozen=True)
class DialRun:
    """The engines, their requests, and the history of earlier epochs."""

    args: Namespace
    config: TrainConfig
    prompts: Sequence[Prompt]
    directory: Path
    """Directory of the indexes."""
    console: Console

    @property
    def kinds(self) -> list[str]:
        """Names of the engines."""
        return [name for name in KINDS if name != "head" or self.args.head]

    async def run(self, temperatures: Sequence[float]) -> list[DialTurn]:
        with ray_cluster("bench", [Wanted("all engines", 1, "a GPU, where there is one")]) as on:
            engines = {name: self._engine(name, bool(on.num_gpus)) for name in self.kinds}
            coordinators = {name: Coordinator([one]) for name, one in engines.items()}
            try:
                for name, coordinator in coordinators.items():
                    self.console.print(f"starting {name}")
                    await coordinator.start()
                    warm_up = await self._roll_out(coordinator, name, 0, WARM_UP_TOKENS)
                    # Drafting engines start last: they need a history to warm up their drafter.
                    History(self.directory).add(0, self.prompts, warm_up.tokens)
                turns: list[DialTurn] = []
                for temperature in temperatures:
                    for engine in engines.values():
                        change = engine.actor.set_temperature.remote(temperature)
                        await wait_for(change, SWITCH_S)
                    first = temperature == temperatures[0]
                    num_laps = self.args.first_laps if first else self.args.laps
                    turns += await self._epochs(temperature, num_laps, coordinators)
                return turns
            finally:
                for coordinator in coordinators.values():
                    await coordinator.shutdown()

    def _engine(self, name: str, on_gpu: bool) -> RayEngine:
        engine_class, drafting = KINDS[name]
        changes: dict[str, Any] = {"drafting": drafting, "history_dir": self.directory}
        if name == "head":
            changes["drafting"] = DraftingConfig(gate=not self.args.ungated)
            changes["specactor"] = self.config.specactor.model_copy(
                update={"head": self.args.head.absolute()}
            )
        if on_gpu:
            rollout = {"gpu_memory_utilization": GPU_SHARE / len(self.kinds)}
        else:
            rollout = {"kv_cache_bytes": self._kv_bytes()}
        changes["rollout"] = self.config.rollout.model_copy(update=rollout)
        config: EngineConfig = self.config.engine.model_copy(update=changes)
        setup = EngineSetup(devices=(0,) if on_gpu else ())
        return RayEngine(0, config, 0, engine_class, setup=setup)

    def _kv_bytes(self) -> int:
        """Return the bytes that hold all requests at their longest, plus two drafts."""
        longest = max(len(prompt.token_ids) for prompt in self.prompts) + self.args.tokens + 64
        num_tokens = self.config.rollout.max_num_seqs * longest
        return min(CPU_KV_BYTES, int(num_tokens * model_shape(self.config).kv_bytes_per_token))

    async def _roll_out(
        self, coordinator: Coordinator, name: str, epoch: int, max_tokens: int | None = None
    ) -> one_step.Lap:
        requests = one_step.step_requests(self.config, self.prompts, epoch)
        if name == "head":
            drafting = DraftSetting(HEAD, self.config.specactor.window)
            requests = [replace(one, drafting=drafting) for one in requests]
        if max_tokens:
            requests = [replace(one, max_response_tokens=max_tokens) for one in requests]
        return await one_step.roll_out(coordinator, AS_IT_IS, [(0, one) for one in requests])

    async def _epochs(
        self, temperature: float, num_laps: int, coordinators: dict[str, Coordinator]
    ) -> list[DialTurn]:
        history = History(self.directory)
        turns: list[DialTurn] = []
        for epoch in range(1, self.args.epochs + 1):
            for number in range(num_laps):
                # Stock vLLM is measured once: further laps only measure what drafts cost.
                names = [name for name in self.kinds if not number or name != "stock"]
                for name in in_turn(names, epoch + number):
                    lap = await self._roll_out(coordinators[name], name, epoch)
                    turns.append(DialTurn(name, temperature, epoch, number, lap))
                self.console.print(
                    f"temperature {temperature:g}, epoch {epoch}/{self.args.epochs}, "
                    f"lap {number + 1}/{num_laps}: {_said(turns[-len(names) :])}"
                )
            (off,) = [turn for turn in turns if turn.engine == "off"][-1:]
            history.add(epoch, self.prompts, off.lap.tokens)
        return turns


class History:
    """The indexes of one temperature, empty at first."""

    def __init__(self, directory: Path) -> None:
        for path in directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._own = IndexLibrary(directory, DraftingConfig())
        self._shared = SharedLibrary(directory, DraftingConfig(), 1)

    def add(
        self, epoch: int, prompts: Sequence[Prompt], tokens: dict[RequestId, Sequence[int]]
    ) -> None:
        """Index the responses of an epoch."""
        groups = groups_of(epoch, prompts, tokens)
        self._own.add(groups)
        for first in range(0, len(groups), BUILD_PROMPTS):
            self._shared.add(groups[first : first + BUILD_PROMPTS])


def groups_of(
    epoch: int, prompts: Sequence[Prompt], tokens: dict[RequestId, Sequence[int]]
) -> list[PromptHistory]:
    """Return the responses of an epoch by prompt. Rewards stay 0, as they do not matter to drafts
    with known noise."""
    responses = defaultdict(list)
    for id, token_ids in tokens.items():
        responses[id.prompt_key].append(np.array(token_ids, np.int32))
    return [
        PromptHistory(one.key, epoch, one.token_ids, own, [0.0] * len(own))
        for one in prompts
        if (own := responses[one.key])
    ]


def _said(turns: Sequence[DialTurn]) -> str:
    return ", ".join(
        f"{turn.engine} {turn.lap.counts['num_tokens'] / turn.lap.seconds:,.0f} tokens/s"
        for turn in turns
    )
