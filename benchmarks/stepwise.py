"""Engines that admit requests one by one and report tokens step by step."""

import asyncio
from collections.abc import Sequence
from typing import Any

from refrain.engines.inference.engine.admission import Admitted
from refrain.engines.inference.engine.process import generate
from refrain.engines.inference.engine.vllm_engine import VLLMEngine


class StepwiseEngine(VLLMEngine):
    """An engine with vLLM's own scheduler and one call per request. It cannot give requests
    back."""

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        args = super()._engine_args(on_cpu)
        return {name: args[name] for name in args.keys() - {"scheduler_cls"}}

    async def _admit(self, llm: Any, requests: Sequence[Admitted]) -> None:
        self._calls = [asyncio.create_task(self._call(llm, request)) for request in requests]

    async def _call(self, llm: Any, request: Admitted) -> None:
        try:
            request.put(await generate(llm, request.name, request.token_ids, **request.params))
        except Exception as error:
            request.put(error)
