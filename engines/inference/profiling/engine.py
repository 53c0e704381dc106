"""An engine that measures its own speed with the code that rollouts use (`AsyncLLM`).

Each measurement uses its own random prompts. The first submission times their prefill. The second
one finds them in the prefix cache, so decoding begins at once. The request submitted last times the
steps: when it gets its first token, all others are decoding too. Only this request reports each
token, because requests of a run report at their end.
"""

import asyncio
import os
import platform
import random
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from refrain.engines.inference.engine.arguments import drafting_graphs
from refrain.engines.inference.engine.process import generate, outputs
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.machine.cuda import installed_vllm
from refrain.schemas.config import EngineConfig
from refrain.schemas.drafting import NGRAM
from refrain.schemas.latency import PointKind, ProfilePoint
from refrain.schemas.profile import MachineFacts, Measurement

_WARM_UP_STEPS = 4
_MAX_TRIES = 3
"""Tries per measurement: on a busy machine the reports of many steps may arrive as one."""
_SLACK_STEPS = 1024
"""Extra steps for the other requests, so that they outlast the timed one. We abort them then."""
NGRAM_SIZES = (2, 4)
"""Lengths of the shortest and longest n-gram that vLLM's drafter looks up."""


class ProfilingEngine(VLLMEngine):
    """An engine that measures its own speed, with the weights on disk. Not for rollouts."""

    def __init__(self, index: int, config: EngineConfig, max_window: int) -> None:
        """Describe an engine; `start` starts it.

        `max_window`: largest draft to verify. With 0, vLLM starts without speculation, which is
        faster because it schedules asynchronously.
        """
        super().__init__(index, config)
        self._max_window = max_window
        self._num_measured = 0

    def facts(self) -> MachineFacts:
        return machine_facts(self._llm)

    async def measure(self, wanted: Measurement, num_steps: int, seed: str) -> list[ProfilePoint]:
        """Measure and return the resulting points. `seed`: of the random prompts."""
        if wanted.kind is PointKind.DRAFT:
            assert wanted.drafter == NGRAM
            args = (wanted.batch, wanted.prompt_tokens, wanted.window, num_steps)
            seconds = max(await self._llm.collective_rpc("time_ngram", args=args))
            return [point_of(wanted, seconds, num_steps)]
        prompts = random_prompts(self._llm, wanted, seed)
        started_s = time.perf_counter()
        await asyncio.gather(*(self._generate_one(prompt, 1) for prompt in prompts))
        prefill = ProfilePoint(
            kind=PointKind.PREFILL,
            tp_degree=wanted.tp_degree,
            batch=wanted.batch,
            rms_tokens=wanted.prompt_tokens,
            seconds=time.perf_counter() - started_s,
        )
        if wanted.kind is PointKind.VERIFY:
            await self._llm.collective_rpc("draft_junk", args=(wanted.window,))
        seconds, context_tokens = await self._timed_steps(prompts, num_steps)
        point = point_of(wanted, seconds, num_steps, context_tokens)
        return [point] if wanted.kind is PointKind.VERIFY else [prefill, point]

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        args = super()._engine_args(on_cpu)
        args["worker_extension_cls"] = (
            "refrain.engines.inference.profiling.worker.ProfilingWorkerExtension"
        )
        if not any(self._config.model.path.glob("*.safetensors*")):
            # A shard has no weights on disk. Random weights take as long.
            args["load_format"] = "dummy"
        if self._max_window:
            args["speculative_config"] = ngram_config(self._max_window)
            args |= {} if on_cpu else drafting_graphs(self._config)
        return args

    async def _timed_steps(self, prompts: list[list[int]], num_steps: int) -> tuple[float, int]:
        """Return the mean seconds of a step, and the mean context tokens of all prompts together.

        Raise RuntimeError if all steps are reported at once in every try.
        """
        for _ in range(_MAX_TRIES):
            stamps = await self._stamps_among(prompts, num_steps)
            if len(stamps) > 1:
                break
        else:
            raise RuntimeError(
                f"the machine is too busy to time single steps: {num_steps} steps were reported at "
                f"once, in each of {_MAX_TRIES} tries. Stop other work on it, or raise decode_steps"
            )
        first, last = min(_WARM_UP_STEPS, len(stamps) - 2), len(stamps) - 1
        (start_s, start_tokens), (end_s, end_tokens) = stamps[first], stamps[last]
        steps = last - first if self._max_window else end_tokens - start_tokens
        context = len(prompts[0]) + (start_tokens + end_tokens) // 2
        return (end_s - start_s) / steps, context * len(prompts)

    async def _stamps_among(
        self, prompts: list[list[int]], num_steps: int
    ) -> list[tuple[float, int]]:
        """Return the time stamps of the last request, while all requests decode."""
        longest = self._config.max_model_len - len(prompts[0]) - self._max_window
        others = [
            asyncio.create_task(self._generate_one(prompt, min(longest, num_steps + _SLACK_STEPS)))
            for prompt in prompts[:-1]
        ]
        # Let the other tasks submit first: vLLM handles requests in the order of submission.
        await asyncio.sleep(0)
        stamps = await self._stamps(prompts[-1], min(longest, num_steps + _WARM_UP_STEPS))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return stamps

    async def _stamps(self, prompt: list[int], max_tokens: int) -> list[tuple[float, int]]:
        """Return (seconds, tokens so far) at each report of a request."""
        from vllm.sampling_params import RequestOutputKind

        told = outputs(
            self._llm, **self._request(prompt, max_tokens), output_kind=RequestOutputKind.DELTA
        )
        stamps, tokens = [], 0
        async for output in told:
            tokens += len(output.outputs[0].token_ids)
            stamps.append((time.perf_counter(), tokens))
        return stamps

    async def _generate_one(self, prompt: list[int], max_tokens: int) -> None:
        await generate(self._llm, **self._request(prompt, max_tokens))

    def _request(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        self._num_measured += 1
        return {
            "name": f"profile-{self._num_measured}",
            "token_ids": prompt,
            "temperature": 1.0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "logprobs": 0,
            "flat_logprobs": True,
            "extra_args": {"sample_key": self._num_measured},
        }


def random_prompts(llm: Any, wanted: Measurement, seed: str) -> list[list[int]]:
    """Return random prompts. They do not depend on the window, so later windows find them cached.

    `llm`: vLLM's `AsyncLLM`.
    """
    rng = random.Random(f"{seed}/{wanted.batch}/{wanted.prompt_tokens}")
    vocab_size = llm.vllm_config.model_config.get_vocab_size()
    return [
        [rng.randrange(vocab_size) for _ in range(wanted.prompt_tokens)]
        for _ in range(wanted.batch)
    ]


def point_of(
    wanted: Measurement, seconds: float, num_repeats: int, context_tokens: int = 0
) -> ProfilePoint:
    return ProfilePoint(
        kind=wanted.kind,
        tp_degree=wanted.tp_degree,
        batch=wanted.batch,
        context_tokens=context_tokens,
        window=wanted.window,
        drafter=wanted.drafter,
        seconds=seconds,
        num_repeats=num_repeats,
    )


def machine_facts(llm: Any) -> MachineFacts:
    """Describe the machine that an engine runs on. `llm`: vLLM's `AsyncLLM`."""
    cache = llm.vllm_config.cache_config
    assert cache.num_gpu_blocks is not None
    return MachineFacts(
        hardware=_hardware(),
        max_active_tokens=cache.num_gpu_blocks * cache.block_size,
        max_step_tokens=llm.vllm_config.scheduler_config.max_num_batched_tokens,
        versions={name: version(name) for name in ("torch", "transformers")}
        | {"vllm": vllm_version(), "python": platform.python_version()},
    )


def _hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"


def ngram_config(window: int) -> dict[str, Any]:
    """Return vLLM's `speculative_config` of the n-gram drafter."""
    shortest, longest = NGRAM_SIZES
    return {
        "method": NGRAM,
        "num_speculative_tokens": window,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
    }


def vllm_version() -> str:
    """Return the version of the installed vLLM, without importing it, which takes seconds."""
    return next(map(version, installed_vllm()), "unknown")
