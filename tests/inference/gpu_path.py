"""Print how vLLM on a GPU would resolve refrain's arguments. Runs without a GPU.

vLLM gets its CUDA platform instead of the CPU's. A subclass gives the answers that would need a
driver: those of a machine with eight H100. Nothing is compiled or captured.
"""

import json
import os
import sys
import types
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

# Only the CUDA build of vLLM has this module, and only kernels use it.
sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
from refrain.engines.inference.engine.process import _ENGINE_ENV  # noqa: E402

os.environ |= _ENGINE_ENV | {"VLLM_USE_V2_MODEL_RUNNER": "0"}

from vllm import AsyncEngineArgs, platforms  # noqa: E402
from vllm.config import CacheConfig, CUDAGraphMode, VllmConfig  # noqa: E402
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher  # noqa: E402
from vllm.v1.worker.gpu import cudagraph_utils  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402
from vllm.v1.worker.gpu_worker import Worker  # noqa: E402
from vllm.v1.worker.utils import get_uniform_decode_token_count, request_memory  # noqa: E402

from refrain.engines.inference.engine import arguments  # noqa: E402
from refrain.engines.inference.engine.graphs import decode_plainly, decode_plainly_on_v2  # noqa: E402
from refrain.engines.pat.memory import PARKED_BYTES, plan_parked_weights, start_share  # noqa: E402
from refrain.schemas.config import EngineConfig, ModelConfig, RolloutConfig  # noqa: E402
from refrain.schemas.drafting import DraftingConfig  # noqa: E402
from tests.inference.real import DEMO  # noqa: E402

BATCHES = (1, 2, 3, 100, 250, 256)
DRAFTED = (2, 17, 257, 300, 1000, 1024, 1025)


class EightH100(CudaPlatformBase):
    """CUDA platform that reports eight H100 without asking a driver."""

    @classmethod
    def get_device_capability(cls, *_: object, **__: object) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, *_: object, **__: object) -> str:
        return "NVIDIA H100"

    @classmethod
    def get_device_total_memory(cls, *_: object, **__: object) -> int:
        return 80 * 2**30

    @classmethod
    def device_count(cls) -> int:
        return 8

    @classmethod
    def get_global_graph_pool(cls) -> None:
        pass

    @classmethod
    def is_cumem_allocator_available(cls) -> bool:
        return True

    @classmethod
    def is_fully_connected(cls, *_: object, **__: object) -> bool:
        return True


def take_over() -> None:
    """Make vLLM use this platform, also in modules that have imported the other one already."""
    platform = platforms._current_platform = EightH100()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "current_platform" in vars(module):
            vars(module)["current_platform"] = platform


def config_of(**changed: Any) -> EngineConfig:
    model = ModelConfig(path=DEMO / "model", dtype="bfloat16")
    return EngineConfig(model=model, rollout=RolloutConfig(), max_model_len=512, **changed)


def resolved(config: EngineConfig, *left_out: str) -> VllmConfig:
    args = arguments.engine_args(config, 3, on_cpu=False)
    kept = {name: value for name, value in args.items() if name not in left_out}
    return AsyncEngineArgs(**kept).create_engine_config()


def told(vllm: VllmConfig) -> dict[str, Any]:
    graphs, parallel = vllm.compilation_config, vllm.parallel_config
    worker = resolve_obj_by_qualname(parallel.worker_cls)
    extension = resolve_obj_by_qualname(parallel.worker_extension_cls)
    return {
        "device": vllm.device_config.device_type,
        "v2_runner": vllm.use_v2_model_runner,
        "async_scheduling": vllm.scheduler_config.async_scheduling,
        "step_tokens": vllm.scheduler_config.max_num_batched_tokens,
        "graphs": str(graphs.cudagraph_mode),
        "capture_sizes": graphs.cudagraph_capture_sizes,
        "num_draft_tokens": vllm.num_speculative_tokens,
        "worker": f"{worker.__module__}.{worker.__qualname__}",
        "extended": not [n for n in dir(extension) if n[:2] != "__" and hasattr(worker, n)],
        "memory_share": vllm.cache_config.gpu_memory_utilization,
        "head_dtype": str(vllm.model_config.head_dtype),
        "sleeps": vllm.model_config.enable_sleep_mode,
        "dispatched": (dispatched_on_v2 if vllm.use_v2_model_runner else dispatched)(
            vllm, plainly=worker is not Worker
        ),
    }


def dispatched(vllm: VllmConfig, *, plainly: bool) -> dict[str, dict[int, Any]]:
    """Return the CUDA graph of each step, as (mode, padded tokens).

    "plain": steps without drafts, by number of requests. "drafted": steps with drafts, by number of
    tokens.
    """
    dispatcher = CudagraphDispatcher(vllm)
    length = dispatcher.uniform_decode_query_len
    runner = SimpleNamespace(cudagraph_dispatcher=dispatcher, uniform_decode_query_len=length)
    if plainly:
        decode_plainly(runner)
    # The runner makes the same call. Assume the least that its attention backend may support.
    mode = vllm.compilation_config.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if plainly else AttentionCGSupport.ALWAYS,
        "the backend",
        runner.uniform_decode_query_len,
    )
    dispatcher.initialize_cudagraph_keys(mode, runner.uniform_decode_query_len)

    def graph(most: int, num_tokens: int, num_requests: int) -> tuple[str, int]:
        """`most`: largest number of tokens of a request."""
        uniform = GPUModelRunner._is_uniform_decode(
            most, runner.uniform_decode_query_len, num_tokens, num_requests
        )
        found, descriptor = dispatcher.dispatch(num_tokens, uniform_decode=uniform)
        return CUDAGraphMode(found).name, descriptor.num_tokens

    return {
        "plain": {num: graph(1, num, num) for num in BATCHES},
        "drafted": {num: graph(9, num, min(num - 1, 256)) for num in DRAFTED},
    }


def dispatched_on_v2(vllm: VllmConfig, *, plainly: bool) -> dict[str, dict[int, Any]]:
    """The same for the V2 runner."""
    made = []

    def initialize_kv_cache() -> None:
        """Choose graphs as the runner does."""
        length = runner.decode_query_len
        mode = vllm.compilation_config.resolve_cudagraph_mode_and_sizes(
            AttentionCGSupport.ALWAYS, "the backend", length, use_v2_model_runner=True
        )
        with patch.object(cudagraph_utils, "get_pp_group"):
            made.append(cudagraph_utils.CudaGraphManager(vllm, "cuda", mode, length))
        made[0]._graphs_captured = True

    length = 1 + vllm.num_speculative_tokens
    runner = SimpleNamespace(decode_query_len=length, initialize_kv_cache=initialize_kv_cache)
    if plainly:
        decode_plainly_on_v2(runner)
    runner.initialize_kv_cache()
    assert runner.decode_query_len == length

    def graph(most: int, num_tokens: int, num_requests: int) -> tuple[str, int]:
        uniform = get_uniform_decode_token_count(num_requests, num_tokens, most, True)
        found = made[0].dispatch(num_requests, num_tokens, uniform, 0, max_query_len=most)
        return found.cg_mode.name, found.num_tokens

    return {
        "plain": {num: graph(1, num, num) for num in BATCHES},
        "drafted": {num: graph(9, num, min(num - 1, 256)) for num in DRAFTED},
    }


def started(num_plans: int) -> dict[str, int]:
    """Draw random pools, and count those that the memory plan accepts or refuses.

    For the accepted pools, count the engines that pass vLLM's own memory check when they start one
    after the other, with our memory share and with vLLM's default.
    """
    random, counts = Random(0), Counter[str]()
    for _ in range(num_plans):
        total = random.choice([24, 48, 80, 141]) * 2**30
        others = random.choice([0.0, 0.0, 0.3]) * total * random.random()
        free = total - others
        weights, kv_cache = random.uniform(1e9, 150e9), random.uniform(1e9, 60e9)
        degrees = random.choice([(1, 2), (2, 4, 8), (1, 8), (4, 8)])
        try:
            parked = plan_parked_weights(weights, degrees, kv_cache, free)
        except ValueError:
            counts["refused"] += 1
            continue
        counts["accepted"] += 1
        for degree in sorted(degrees, reverse=True):
            snapshot = SimpleNamespace(free_memory=int(free), total_memory=total, device_="cuda:0")
            share = start_share(weights, degree, kv_cache, total)
            counts["started"] += starts(snapshot, share)
            counts["started by default"] += starts(snapshot, 0.92)
            counts["engines"] += 1
            free -= PARKED_BYTES + (weights / degree if parked == "resident" else 0.0)
    return counts


def starts(snapshot: Any, share: float) -> bool:
    try:
        request_memory(snapshot, CacheConfig(gpu_memory_utilization=share))
    except ValueError:
        return False
    return True


def on_v2() -> dict[str, Any]:
    rollout = RolloutConfig(model_runner="v2")
    off = EngineConfig(
        model=ModelConfig(path=DEMO / "model", dtype="bfloat16"), rollout=rollout, max_model_len=512
    )
    on = off.model_copy(update={"drafting": DraftingConfig(enabled=True)})
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    with patch("vllm.config.vllm.HAS_TRITON", True):
        return {
            "v2 off": told(resolved(off)),
            "v2 on": told(resolved(on)),
            "v2 on, vLLM's graphs": told(resolved(on, *arguments.drafting_graphs(on))),
        }


def main() -> None:
    take_over()
    on = config_of(drafting=DraftingConfig(enabled=True))
    rollout = on.rollout.model_copy(
        update={"gpu_memory_utilization": 0.4, "kv_cache_bytes": 2**30, "batch_invariant": True}
    )
    head = on.model.model_copy(update={"head_dtype": "float32"})
    pooled = on.model_copy(update={"pooled": True, "rollout": rollout, "model": head})
    found = {
        "off": told(resolved(config_of())),
        "on": told(resolved(on)),
        "on, vLLM's graphs": told(resolved(on, *arguments.drafting_graphs(on))),
        "in turn": told(resolved(config_of(takes_turns=True))),
        "pooled": told(resolved(pooled)),
    } | on_v2()
    print(json.dumps(found | {"memory": started(3000)}))


if __name__ == "__main__":
    main()
