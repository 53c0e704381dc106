"""An engine without a trainer."""

from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.schemas.weights import PolicyWeights


class CheckpointEngine(VLLMEngine):
    """An engine without a trainer. It serves the weights of its model directory."""

    async def load_weights(self, weights: PolicyWeights) -> float:
        assert weights.source is None, "these weights would not be served"
        self._policy_version = weights.policy_version
        return 0.0
