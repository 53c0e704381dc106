"""Scoring off the driver: the process that decodes and scores responses, and what the driver holds
of it."""

import json
import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from engines.actors import ActorError, NoAnswer, RemoteActor
from engines.data.tokenizer import open_tokenizer
from engines.garbage import made_to_stay
from engines.reward.process import START_TIMEOUT_S as IMPORT_TIMEOUT_S
from engines.reward.scorer import Response, Scorer
from engines.store.actor import StoredRows
from schemas.base import with_absolute_paths
from schemas.config import TrainConfig
from schemas.data import Prompt
from schemas.inputs import ModelConfig
from schemas.reward import BuiltinReward, FunctionReward

MAX_PROCESSES = 8
"""Processes that score, at most; otherwise one per core."""
MAX_ROWS_AT_ONCE = 64
"""Rows whose tokens are Python's at a time: they take ten times as much room there."""
START_TIMEOUT_S = 600.0
"""Longest time to start the process and load the tokenizer."""
QUIET_S = 120.0
"""Longest time in which nothing is done, besides that of one response: `MAX_ROWS_AT_ONCE` rows are
decoded, or the process starts again after a death."""


class ScorerHangs(RuntimeError):
    """Nothing was scored for longer than one response may take."""


class RewardActor:
    """A tokenizer and a scorer. It keeps nothing between calls, so a call may be repeated."""

    def __init__(
        self,
        model: ModelConfig,
        config: BuiltinReward | FunctionReward,
        surroundings: Mapping[str, str] | None = None,
    ) -> None:
        with made_to_stay():
            self._tokenizer = open_tokenizer(
                model.path, trust_remote_code=model.trust_remote_code, try_first=False
            )
        num_processes = min(MAX_PROCESSES, os.cpu_count() or 1)
        self._scorer = Scorer(config, num_processes, surroundings)
        self._num_decoded = 0

    def num_done(self) -> int:
        """Responses decoded so far, and responses scored; asked for while `score` runs."""
        return self._num_decoded + self._scorer.num_scored

    def score(self, rows: pa.Table, prompts: Mapping[str, Prompt]) -> pa.Table:
        """Rewards of rows with `prompt_key`, `sample_index` and `response_token_ids`.

        Returns `prompt_key`, `sample_index`, `reward` and `extra` (a JSON object) in the same
        order. Raises ValueError as `Scorer.score` does.
        """
        responses = [
            self._response(row, prompts[row["prompt_key"]])
            for batch in rows.to_batches(max_chunksize=MAX_ROWS_AT_ONCE)
            for row in batch.to_pylist()
        ]
        scored = self._scorer.score(responses)
        return pa.table(
            {
                "prompt_key": rows["prompt_key"],
                "sample_index": rows["sample_index"],
                "reward": pa.array([score for score, _ in scored], pa.float64()),
                "extra": pa.array([json.dumps(extra) for _, extra in scored], pa.string()),
            }
        )

    def _response(self, row: dict[str, Any], prompt: Prompt) -> Response:
        text = self._tokenizer.decode(row["response_token_ids"], skip_special_tokens=True)
        self._num_decoded += 1
        return Response(
            prompt_key=row["prompt_key"],
            sample_index=row["sample_index"],
            data_source=prompt.data_source,
            solution_str=text,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )


class ScorerPool:
    """A `RewardActor` and the processes it runs a user's function in. Needs Ray."""

    def __init__(self, config: TrainConfig, name: str | None = None) -> None:
        """`name`: what other processes find the actor by."""
        self._name = name
        # The actor has another working directory.
        self._model = with_absolute_paths(config.model)
        self._reward = with_absolute_paths(config.reward)
        self._surroundings = config.data.surroundings
        self._actor: RemoteActor | None = None

    async def start(self) -> None:
        """Start the process. Raises RuntimeError when it does not come up in time."""
        import ray

        self._actor = RemoteActor(
            "the scorer",
            RewardActor,
            self._model,
            self._reward,
            self._surroundings,
            node_id=ray.get_runtime_context().get_node_id(),
            max_restarts=3,
            max_task_retries=1,
            found_by=self._name,
            watched=True,
        )
        await self._actor.call("__ray_ready__", timeout_s=START_TIMEOUT_S)

    def adopt(self, actor: Any) -> None:
        """Take the process that another one has started."""
        self._actor = RemoteActor.of("the scorer", actor)

    async def score(self, rows: StoredRows, prompts: Mapping[str, Prompt]) -> pa.Table:
        """Rewards of rows with the columns `engines.store.tables.SCORING`, as `RewardActor.score`
        gives them. Raises ValueError that names the first response without a score, and
        ScorerHangs."""
        assert self._actor, "start() comes first"
        asked = {key: prompts[key] for key in rows.counts.prompt_keys}
        stall_s = longest_stall_s(self._reward)
        try:
            return await self._actor.call_while_moving(
                "score", rows.reference, asked, progress="num_done", stall_s=stall_s
            )
        except NoAnswer as error:
            raise ScorerHangs(
                f"{error}: of {rows.counts.num_rows} responses none was scored meanwhile, where "
                f"one may take reward.timeout_s = {self._reward.timeout_s:g} s"
            ) from error
        except ActorError as error:
            raise error.cause or error from None

    async def shutdown(self) -> None:
        """Ends the process; what it runs ends with it."""
        actor, self._actor = self._actor, None
        if actor:
            actor.kill()


def longest_stall_s(reward: BuiltinReward | FunctionReward) -> float:
    """Longest time in which no response is decoded or scored."""
    importing_s = IMPORT_TIMEOUT_S if isinstance(reward, FunctionReward) else 0.0
    return reward.timeout_s + max(QUIET_S, importing_s)
