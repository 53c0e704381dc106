"""refrain's scheduler without its fast steps, to compare with."""

from typing import Any

from refrain.engines.inference.engine.scheduler import make_scheduler as make


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """Return a scheduler that leaves each step to vLLM."""
    scheduler = make(vllm_config, **kwargs)
    scheduler._can_be_fast = False
    return scheduler
