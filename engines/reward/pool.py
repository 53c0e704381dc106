"""Scoring off the driver: what the driver holds of the process that scores."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from engines.bounded import bounded
from engines.reward.actor import RewardActor
from engines.store.actor import StoredRows
from schemas.config import TrainConfig
from schemas.data import Prompt
from schemas.reward import FunctionReward

START_TIMEOUT_S = 600.0
"""Longest time to start the process and load the tokenizer."""


class ScorerPool:
    """A `RewardActor` and the processes it runs a user's function in. Needs Ray."""

    def __init__(self, config: TrainConfig) -> None:
        self._tokenizer_path = config.model.path.absolute()
        self._reward = config.reward
        if isinstance(self._reward, FunctionReward):
            # The actor has another working directory.
            path = self._reward.path.absolute()
            self._reward = self._reward.model_copy(update={"path": path})
        self._actor: Any = None

    async def start(self) -> None:
        """Start the process. Raises RuntimeError when it does not come up in time."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor: Any = ray.remote(RewardActor).options(
            num_cpus=0, max_restarts=3, max_task_retries=1, scheduling_strategy=here
        )
        self._actor = actor.remote(self._tokenizer_path, self._reward)
        await bounded(self._actor.ready.remote(), START_TIMEOUT_S, "the scorer's start")

    async def score(self, rows: StoredRows, prompts: Mapping[str, Prompt]) -> pa.Table:
        """Rewards of rows with the columns `engines.store.tables.SCORING`.

        Returns `prompt_key`, `sample_index`, `reward` and `extra` (a JSON object) in the same
        order. Raises ValueError that names the first response without a score.
        """
        from ray.exceptions import RayTaskError

        asked = {key: prompts[key] for key in rows.counts.prompt_keys}
        # Each response is bounded by itself; this is in case the actor is not.
        limit_s = START_TIMEOUT_S + rows.counts.num_rows * self._reward.timeout_s
        try:
            scores = self._actor.score.remote(rows.reference, asked)
            return await bounded(scores, limit_s, "scoring")
        except RayTaskError as error:
            raise error.cause from None

    async def shutdown(self) -> None:
        """Ends the process; what it runs ends with it."""
        import ray

        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None
