"""Scoring off the driver: what the driver holds of the process that scores."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from engines.actors import ActorError, RemoteActor
from engines.reward.actor import RewardActor
from engines.store.actor import StoredRows
from schemas.config import TrainConfig
from schemas.data import Prompt
from schemas.reward import FunctionReward

START_TIMEOUT_S = 600.0
"""Longest time to start the process and load the tokenizer."""


class ScorerPool:
    """A `RewardActor` and the processes it runs a user's function in. Needs Ray."""

    def __init__(self, config: TrainConfig, name: str | None = None) -> None:
        """`name`: what other processes find the actor by."""
        self._name = name
        self._tokenizer_path = config.model.path.absolute()
        self._reward = config.reward
        if isinstance(self._reward, FunctionReward):
            # The actor has another working directory.
            path = self._reward.path.absolute()
            self._reward = self._reward.model_copy(update={"path": path})
        self._actor: RemoteActor | None = None

    async def start(self) -> None:
        """Start the process. Raises RuntimeError when it does not come up in time."""
        import ray

        self._actor = RemoteActor(
            "the scorer",
            RewardActor,
            self._tokenizer_path,
            self._reward,
            node_id=ray.get_runtime_context().get_node_id(),
            max_restarts=3,
            max_task_retries=1,
            found_by=self._name,
        )
        await self._actor.call("ready", timeout_s=START_TIMEOUT_S)

    def adopt(self, actor: Any) -> None:
        """Take the process that another one has started."""
        self._actor = RemoteActor.of("the scorer", actor)

    async def score(self, rows: StoredRows, prompts: Mapping[str, Prompt]) -> pa.Table:
        """Rewards of rows with the columns `engines.store.tables.SCORING`.

        Returns `prompt_key`, `sample_index`, `reward` and `extra` (a JSON object) in the same
        order. Raises ValueError that names the first response without a score.
        """
        assert self._actor, "start() comes first"
        asked = {key: prompts[key] for key in rows.counts.prompt_keys}
        # Each response is bounded by itself; this is in case the actor is not.
        limit_s = START_TIMEOUT_S + rows.counts.num_rows * self._reward.timeout_s
        try:
            return await self._actor.call("score", rows.reference, asked, timeout_s=limit_s)
        except ActorError as error:
            raise error.cause or error from None

    async def shutdown(self) -> None:
        """Ends the process; what it runs ends with it."""
        actor, self._actor = self._actor, None
        if actor:
            actor.kill()
