"""Ray actor that decodes and scores responses, and the driver's handle to it."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from refrain.engines.actors import ActorError, NoAnswer, RemoteActor
from refrain.engines.data.tokenizer import open_tokenizer
from refrain.engines.garbage import freeze_garbage
from refrain.engines.reward.process import START_TIMEOUT_S as IMPORT_TIMEOUT_S
from refrain.engines.reward.results import Scored
from refrain.engines.reward.scorer import Response, Scorer, unscored
from refrain.engines.store.actor import StoredRows
from refrain.schemas.base import with_absolute_paths
from refrain.schemas.config import TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.inputs import ModelConfig
from refrain.schemas.reward import EnvironmentReward, FunctionReward, RewardConfig
from refrain.schemas.rollout import FinishReason

MAX_PROCESSES = 8
"""Most scorer processes. On fewer cores there is one per core."""
MAX_ROWS_AT_ONCE = 64
"""Rows converted to Python at a time: Python objects take ten times the memory of Arrow."""
START_TIMEOUT_S = 600.0
"""Time limit for starting the process and loading the tokenizer."""
QUIET_S = 120.0
"""Longest time without progress, besides scoring one response: decoding `MAX_ROWS_AT_ONCE` rows, or
restarting the process after a death."""
TURNS = "turns"
"""Name of the turns in `extra_info`. It replaces a field of the data set with this name."""
_KEPT = ("score", "num_calls", "num_failed_calls")
"""Fields of a turn that scorers get. Waiting times would make scores depend on the machine."""

FAILED = unscored("its environment failed")
"""Reward of a failed conversation."""


class ScorerHangs(RuntimeError):
    """No response was scored for longer than one response may take."""


class RewardActor:
    """Tokenizer and scorer. It keeps no state between calls, so a call may be repeated."""

    def __init__(
        self,
        model: ModelConfig,
        config: RewardConfig,
        surroundings: Mapping[str, str] | None = None,
        own_rewards: Mapping[str, RewardConfig] | None = None,
    ) -> None:
        """`config`: the reward of prompts whose source is not in `own_rewards`."""
        with freeze_garbage():
            self._tokenizer = open_tokenizer(
                model.path, trust_remote_code=model.trust_remote_code, try_first=False
            )
        rewards = {"": config} | dict(own_rewards or {})
        self._scorers = {name: _scorer(one, surroundings) for name, one in rewards.items()}
        self._num_decoded = 0

    def num_done(self) -> int:
        """Return the responses decoded so far plus the responses scored. The driver calls this
        while `score` runs."""
        scorers = filter(None, self._scorers.values())
        return self._num_decoded + sum(scorer.num_scored for scorer in scorers)

    def score(self, rows: pa.Table, prompts: Mapping[str, Prompt]) -> pa.Table:
        """Score rows with the columns `engines.store.tables.SCORING`.

        The text of a conversation is what the policy sampled, one turn a line. Its
        `extra_info["turns"]` has both sides: `[{"sampled": "<tool_call>..", "observed": "6", ..}]`.
        A failed conversation gets 0, and no scorer sees it.

        Returns `prompt_key`, `sample_index`, `reward` and `extra` (a JSON object) in the same
        order, sources with rewards of their own later, failed conversations last. Raises ValueError
        as `Scorer.score` does.
        """
        has_failed = pc.field("finish_reason") == str(FinishReason.FAILED)
        failures, others = rows.filter(has_failed), rows.filter(~has_failed)
        rewards = [
            environment_rewards(own)
            if (scorer := self._scorers[name]) is None
            else self._scored(scorer, own, prompts)
            for name, own in self._by_reward(others, prompts)
        ]
        return pa.concat_tables([*rewards, rewards_of(failures, [FAILED] * failures.num_rows)])

    def _by_reward(
        self, rows: pa.Table, prompts: Mapping[str, Prompt]
    ) -> Iterator[tuple[str, pa.Table]]:
        """Yield the sources with rewards of their own and their rows, after the other rows."""
        keys: dict[str, list[str]] = {name: [] for name in self._scorers}
        for key, prompt in prompts.items():
            keys[prompt.source if prompt.source in keys else ""].append(key)
        for name, own in keys.items():
            yield name, rows.filter(pc.field("prompt_key").isin(pa.array(own, pa.string())))

    def _scored(self, scorer: Scorer, rows: pa.Table, prompts: Mapping[str, Prompt]) -> pa.Table:
        responses = [
            self._response(row, prompts[row["prompt_key"]])
            for batch in rows.to_batches(max_chunksize=MAX_ROWS_AT_ONCE)
            for row in batch.to_pylist()
        ]
        return rewards_of(rows, scorer.score(responses))

    def _response(self, row: dict[str, Any], prompt: Prompt) -> Response:
        text, extra_info = self._text_of(row, prompt.extra_info)
        self._num_decoded += 1
        return Response(
            prompt_key=row["prompt_key"],
            sample_index=row["sample_index"],
            data_source=prompt.data_source,
            solution_str=text,
            ground_truth=prompt.ground_truth,
            extra_info=extra_info,
        )

    def _text_of(
        self, row: dict[str, Any], extra_info: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Return the sampled text, and the prompt's fields with the response's turns."""
        if not row["turns"]:
            return self._decode(row["response_token_ids"]), extra_info
        rest = iter(row["response_token_ids"])
        turns = [self._turn(turn, rest) for turn in row["turns"]]
        return "\n".join(turn["sampled"] for turn in turns), extra_info | {TURNS: turns}

    def _turn(self, turn: dict[str, Any], rest: Iterator[int]) -> dict[str, Any]:
        """Take a turn's tokens from `rest`. Return their texts with the turn's score and counts of
        calls. `observed` is None where the response ended."""

        def text(num_tokens: int | None) -> str | None:
            return None if num_tokens is None else self._decode(list(islice(rest, num_tokens)))

        sampled, observed = text(turn["num_sampled"]), text(turn["num_observed"])
        return {"sampled": sampled, "observed": observed} | {name: turn[name] for name in _KEPT}

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


async def import_pandas() -> None:
    """Make pyarrow import pandas, in a thread. Otherwise the first rewards that Ray sends do, and
    hold up the event loop for 0.2 s."""
    await asyncio.to_thread(pa.array, [0])


class ScorerPool:
    """Driver's handle to a `RewardActor` and its scorer processes. Needs Ray."""

    def __init__(self, config: TrainConfig, name: str | None = None) -> None:
        """`name`: name by which other processes find the actor."""
        self._name = name
        # The actor has another working directory, so make paths absolute.
        self._model = with_absolute_paths(config.model)
        self._reward = with_absolute_paths(config.reward)
        own = config.data.own_rewards.items()
        self._own_rewards = {name: with_absolute_paths(reward) for name, reward in own}
        self._surroundings = config.data.surroundings
        self._actor: RemoteActor | None = None

    async def start(self) -> None:
        """Start the actor. Raises RuntimeError when it is not ready in time."""
        import ray

        self._actor = RemoteActor(
            "the scorer",
            RewardActor,
            self._model,
            self._reward,
            self._surroundings,
            self._own_rewards,
            node_id=ray.get_runtime_context().get_node_id(),
            max_restarts=3,
            max_task_retries=1,
            found_by=self._name,
            watched=True,
        )
        await asyncio.gather(
            self._actor.call("__ray_ready__", timeout_s=START_TIMEOUT_S),
            import_pandas(),
        )

    def adopt(self, actor: Any) -> None:
        """Use an actor that another process has started."""
        self._actor = RemoteActor.of("the scorer", actor)

    async def score(self, rows: StoredRows, prompts: Mapping[str, Prompt]) -> pa.Table:
        """Score rows with the columns `engines.store.tables.SCORING`, and return the table of
        `RewardActor.score`. Raises ValueError that names the first response without a score, or
        ScorerHangs."""
        assert self._actor, "start() comes first"
        asked = {key: prompts[key] for key in rows.counts.prompt_keys}
        rewards = (self._reward, *self._own_rewards.values())
        stall_s = max(map(longest_stall_s, rewards))
        try:
            return await self._actor.call_while_moving(
                "score", rows.reference, asked, progress="num_done", stall_s=stall_s
            )
        except NoAnswer as error:
            limit_s = max(getattr(reward, "timeout_s", stall_s) for reward in rewards)
            raise ScorerHangs(
                f"{error}: none of {rows.counts.num_rows} responses was scored meanwhile. One may "
                f"take at most reward.timeout_s = {limit_s:g} s"
            ) from error
        except ActorError as error:
            raise error.cause or error from None

    async def shutdown(self) -> None:
        """Kill the actor. Its scorer processes end with it."""
        actor, self._actor = self._actor, None
        if actor:
            actor.kill()


def _scorer(config: RewardConfig, surroundings: Mapping[str, str] | None) -> Scorer | None:
    """Return the scorer of a reward. None: the environment has scored."""
    if isinstance(config, EnvironmentReward):
        return None
    return Scorer(config, min(MAX_PROCESSES, os.cpu_count() or 1), surroundings)


def environment_rewards(rows: pa.Table) -> pa.Table:
    """Return the environments' scores as rewards, with the columns of `RewardActor.score`.

    Raise ValueError that names the first response without a score.
    """
    unscored = rows.filter(pc.field("environment_score").is_null())
    if unscored.num_rows:
        first = unscored.slice(0, 1).to_pylist()[0]
        raise ValueError(
            f"the environment gave no score for sample {first['sample_index']} of prompt "
            f"{first['prompt_key']}, which ended by {first['finish_reason']}: return a number from "
            "its `step` and `end`, or score with reward.type: function"
        )
    return rewards_of(rows, [(score, {}) for score in rows["environment_score"].to_pylist()])


def rewards_of(rows: pa.Table, scored: Sequence[Scored]) -> pa.Table:
    """Return the rewards of rows as a table (`engines.store.tables.REWARDS`)."""
    return pa.table(
        {
            "prompt_key": rows["prompt_key"],
            "sample_index": rows["sample_index"],
            "reward": pa.array([score for score, _ in scored], pa.float64()),
            "extra": pa.array([json.dumps(extra) for _, extra in scored], pa.string()),
        }
    )


def longest_stall_s(reward: RewardConfig) -> float:
    """Return the longest time in seconds without a decoded or scored response."""
    if isinstance(reward, EnvironmentReward):
        return QUIET_S
    importing_s = IMPORT_TIMEOUT_S if isinstance(reward, FunctionReward) else 0.0
    return reward.timeout_s + max(QUIET_S, importing_s)
