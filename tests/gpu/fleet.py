"""Engines that run beside each other on one GPU and take turns with the same requests.

stock    unchanged vLLM: its own runner, asynchronous scheduling
off      refrain without drafts; takes turns with the trainer
on       refrain with drafts
v2_on    as `on`, on vLLM's V2 runner
v2       as `off`, on vLLM's V2 runner; only on cards with much memory
v2_head  as `v2`, with drafts from a head alone; only on such cards

A rehearsal has no engines on the V2 runner, unless Triton's interpreter is on (`tests.inference.
interpreted_env`).
"""

import os
import statistics
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from refrain.engines.draft_head.model import MOST_TOKENS
from tests.gpu.models import LOGIT_STD, SHAPES, WEIGHT_STD, write_model
from tests.gpu.needs import REHEARSAL

SHAPE = "qwen3-tiny" if REHEARSAL else "qwen3-1.7b"
PROMPT_TOKENS, RESPONSE_TOKENS = (16, 24) if REHEARSAL else (64, 256)
NUM_PROMPTS, GROUP_SIZE = (2, 4) if REHEARSAL else (32, 8)
NUM_ROWS = NUM_PROMPTS * GROUP_SIZE
SHORT_TOKENS = RESPONSE_TOKENS // 4
FEW = 4 if REHEARSAL else 16
"""Number of requests in a small batch."""
LAPS = 1 if REHEARSAL else 3
MOST_FLIPS = 0.05
"""Flips per token that rounding can explain. With another sampler there would be almost 1."""
KV_CACHE_BYTES = 2**28 if REHEARSAL else 11 * 2**30
SHARE = 0.92 if REHEARSAL else 0.25
"""Share of the GPU's memory that must be free when an engine starts."""
MUCH_MEMORY = 120e9
SAMPLED = {"worker_extension_cls": "tests.gpu.stack_sampler.SampledWorker"}
RollOut = Callable[[list], tuple[Any, float]]


class Fleet:
    """Engines by name, and the requests that all of them generate."""

    def __init__(self, directory: Path, device: str) -> None:
        from tests.gpu.local_engine import policy_weights, train_config
        from tests.inference.heads import right_head

        model = write_model(SHAPE, device, torch.bfloat16, directory / "model")
        self.config = train_config(
            model,
            directory,
            PROMPT_TOKENS,
            response_tokens=RESPONSE_TOKENS,
            weight_sync="ipc",
            kv_cache_bytes=KV_CACHE_BYTES,
            gpu_memory_utilization=SHARE,
        )
        self.canaries = [r.prompt_token_ids for r in self.requests(0)[::GROUP_SIZE][:4]]
        self.weights = policy_weights(self.config, self.canaries)
        echo = write_model(SHAPE, device, torch.bfloat16, directory / "echo", echo=True)
        model_config = self.config.model.model_copy(update={"path": echo})
        self.echo = policy_weights(
            self.config.model_copy(update={"model": model_config}), self.canaries
        )
        """Weights with which every draft from history is right, without near ties."""
        self.history = directory / "history"
        self.history.mkdir()
        shape, scale = SHAPES[SHAPE], LOGIT_STD / WEIGHT_STD
        self.head = right_head(
            directory / "head", torch.full((shape["hidden_size"],), scale), shape["vocab_size"]
        )
        """With the weights `echo`, each of its drafts is right, too."""
        self.first_sync_s: dict[str, float] = {}
        self.first_request_s: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        """Why an engine is not there, by its name. The others are measured without it."""

    def requests(self, epoch: int, response_tokens: int = RESPONSE_TOKENS) -> list:
        """Return all requests. Each epoch has other noise."""
        from tests.gpu.local_engine import make_requests

        # The head drafts no others.
        vocab_size = min(SHAPES[SHAPE]["vocab_size"], MOST_TOKENS)
        return make_requests(
            NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS, response_tokens, vocab_size, epoch
        )

    def __getitem__(self, name: str) -> Any:
        return self._engines[name]

    def __contains__(self, name: str) -> bool:
        return name in self._engines

    @property
    def drafting(self) -> list[str]:
        """Names of the engines that draft."""
        return [name for name in ("on", "v2_on", "v2_head") if name in self]

    @contextmanager
    def started(self) -> Iterator["Fleet"]:
        from tests.gpu.local_engine import all_begun

        kinds = self._kinds()
        with all_begun(list(kinds.values())) as engines:
            self._engines = dict(zip(kinds, engines, strict=True))
            for name in kinds:
                try:
                    self._warm_up(name)
                except Exception as error:
                    self.failed[name] = "".join(traceback.format_exception(error))
                    del self._engines[name]
            yield self

    def _kinds(self) -> dict[str, tuple[Any, Any]]:
        from refrain.schemas.drafting import SpecActorConfig

        head = SpecActorConfig(head=self.head)
        kinds = {
            "off": (_other(**SAMPLED), self._config(False, takes_turns=True)),
            "on": (_other(**SAMPLED), self._config(True, history_dir=self.history)),
            "stock": (_stock(), self._config(False)),
            "v2_on": (_other(**SAMPLED), self._config(True, "v2", history_dir=self.history)),
            "v2": (_other(**SAMPLED), self._config(False, "v2")),
            "v2_head": (_other(**SAMPLED), self._config(False, "v2", specactor=head)),
        }
        if not REHEARSAL and _card_bytes() < MUCH_MEMORY:
            del kinds["v2"], kinds["v2_head"]
        if REHEARSAL and os.environ.get("TRITON_INTERPRET") != "1":
            kinds = {name: kind for name, kind in kinds.items() if not name.startswith("v2")}
        return kinds

    def _warm_up(self, name: str) -> None:
        self[name].started()
        self.first_sync_s[name] = self.load(name, self.weights)
        _, self.first_request_s[name] = self[name].roll_out(self.requests(0)[:1])

    def load(self, name: str, weights: Any) -> float:
        """Load weights into an engine. Return the seconds. Stock vLLM keeps its own."""
        from refrain.schemas.weights import PolicyWeights

        given = PolicyWeights(0, None, ()) if name == "stock" else weights
        _, seconds = self[name].timed(self[name].engine.load_weights(given))
        return seconds

    def _config(self, drafts: bool, runner: str = "v1", **changes: Any) -> Any:
        from refrain.schemas.drafting import DraftingConfig

        of_rollout = {
            "weight_sync": "ipc" if changes.get("takes_turns") else "file",
            "model_runner": runner,
        }
        rollout = self.config.rollout.model_copy(update=of_rollout)
        drafting = DraftingConfig(enabled=drafts)
        return self.config.engine.model_copy(
            update={"rollout": rollout, "drafting": drafting, **changes}
        )


def _other(**args: Any) -> Any:
    """Return refrain's engine with other arguments of vLLM."""
    from refrain.engines.inference.engine.vllm_engine import VLLMEngine

    class Other(VLLMEngine):
        def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
            return super()._engine_args(on_cpu) | args

    return Other


def _card_bytes() -> int:
    return torch.cuda.mem_get_info()[1]


def _stock() -> Any:
    from refrain.benchmarks.stock import StockEngine
    from refrain.engines.inference.engine.checkpoint_engine import CheckpointEngine

    class Stock(CheckpointEngine, StockEngine):
        """Stock vLLM with the weights of the model directory.

        It skips vLLM's kernel warm-up of half a minute: the first requests warm the kernels up.
        """

        def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
            less = {} if on_cpu else {"kernel_config": {"enable_jit_warmup": False}}
            return super()._engine_args(on_cpu) | less

    return Stock


def in_turn(ways: dict[str, RollOut], requests_of: Callable[[int], list]) -> dict[str, float]:
    """Return the median tokens per second of each way. The first lap is a warm-up."""
    from tests.gpu.local_engine import num_tokens

    speeds = defaultdict(list)
    for lap in range(LAPS + 1):
        requests = requests_of(lap)
        for name, roll_out in ways.items():
            rows, seconds = roll_out(requests)
            if lap:
                speeds[name].append(num_tokens(rows) / seconds)
    return {name: statistics.median(laps) for name, laps in speeds.items()}


def in_batches(engine: Any) -> RollOut:
    """Let stock vLLM get all requests at once, as refrain's engines do."""

    def roll_out(requests: list) -> tuple[Any, float]:
        engine.engine.in_batches = True
        try:
            return engine.roll_out(requests)
        finally:
            engine.engine.in_batches = False

    return roll_out
