"""An engine that serves the weights of its model directory as they are."""

from engines.inference.engine.vllm_engine import VLLMEngine
from schemas.weights import PolicyWeights


class CheckpointEngine(VLLMEngine):
    """Engine without a trainer behind it: vLLM has loaded the weights when it came up."""

    async def load_weights(self, weights: PolicyWeights) -> float:
        assert weights.buffer is None, "these weights would not be served"
        self._policy_version = weights.policy_version
        return 0.0
