"""Conversations of `refrain bench tools`: seeded lengths of turns, seeded seconds of tools."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from refrain.benchmarks.laps import Row
from refrain.benchmarks.turn_engine import TURN_TOKENS, Usage
from refrain.engines.inference.engine.arguments import CPU_BLOCK_TOKENS
from refrain.schemas.config import TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.keys import sample_key
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest, Split
from refrain.tasks.run.environments import task_of

TURNS = 5
TOOL_S = (0.2, 2.0)
"""Bounds of a tool's seconds before they are scaled."""
MEAN_TOOL_S = fmean(TOOL_S)
OBSERVED_CHARACTERS = 16
OBSERVED_TOKENS = 40
"""Room for an observation and the template around it."""


@dataclass(frozen=True)
class Talk:
    """A conversation before it begins."""

    prompt: Prompt
    sample: int
    turn_tokens: tuple[int, ...]
    """Tokens of each turn."""
    tool_s: tuple[float, ...]
    """Seconds of each tool before they are scaled."""

    @property
    def num_tokens(self) -> int:
        """Most tokens at its end, the prompt included."""
        observed = OBSERVED_TOKENS * len(self.tool_s)
        return len(self.prompt.token_ids) + sum(self.turn_tokens) + observed

    def request(self, config: TrainConfig, scale: float | None) -> RolloutRequest:
        """Return its request. `scale`: factor on the tools' seconds. None: there are no tools, and
        the turns' tokens are one response."""
        id = RequestId(Split.TRAIN, 1, self.prompt.key, self.sample)
        request = RolloutRequest(
            id=id,
            prompt_token_ids=self.prompt.token_ids,
            sample_key=sample_key(config.seed, 1, id.split, id.prompt_key, id.sample_index),
            max_response_tokens=sum(self.turn_tokens),
        )
        if scale is None:
            return request
        task = task_of(config, id, self.prompt)
        assert task is not None, "no environment"
        extra_info = {
            TURN_TOKENS: list(self.turn_tokens),
            "waits_s": [scale * seconds for seconds in self.tool_s],
            "observation_characters": OBSERVED_CHARACTERS,
        }
        task = replace(task, extra_info=extra_info)
        most = config.data.max_response_tokens
        return replace(request, task=task, max_response_tokens=most)


@dataclass(frozen=True)
class TalkLap:
    """One lap of an engine."""

    rollouts: Sequence[Rollout]
    usage: Usage
    slots: int

    @property
    def seconds(self) -> float:
        """Seconds from the first submission to the last end."""
        began_s = min(rollout.started_s for rollout in self.rollouts)
        return max(rollout.finished_s for rollout in self.rollouts) - began_s

    @property
    def in_use(self) -> float:
        """Share of the slots in use."""
        return self.usage.slot_s / (self.slots * self.seconds)

    @property
    def turn_s(self) -> float:
        """Mean seconds of a turn in vLLM."""
        return self.usage.slot_s / (TURNS * len(self.rollouts))

    @property
    def tool_s(self) -> float:
        """Mean seconds of a tool, or 0 without tools."""
        turns = [turn for one in self.rollouts for turn in one.generated.turns[:-1]]
        return fmean(turn.waited_s for turn in turns) if turns else 0.0

    def share_identical(self, other: "TalkLap") -> float:
        """Return the share of conversations that have the same tokens in the other lap."""
        tokens = {one.id: list(one.generated.token_ids) for one in other.rollouts}
        return fmean(list(one.generated.token_ids) == tokens[one.id] for one in self.rollouts)

    def row(self) -> Row:
        times = {name: getattr(self, name) for name in ("seconds", "in_use", "turn_s", "tool_s")}
        num_tokens = sum(rollout.num_tokens for rollout in self.rollouts)
        return {"num_tokens": num_tokens, **times, **asdict(self.usage)}


def make_talks(prompts: Sequence[Prompt], number: int, mean_tokens: int, seed: int) -> list[Talk]:
    """Return conversations of seeded lengths and tools. The first ones do not depend on
    `number`."""
    drawn = random.Random(seed)
    shortest, longest = (mean_tokens + 1) // 2, 3 * mean_tokens // 2
    return [
        Talk(
            prompts[i % len(prompts)],
            i // len(prompts),
            tuple(drawn.randint(shortest, longest) for _ in range(TURNS)),
            tuple(drawn.uniform(*TOOL_S) for _ in range(TURNS - 1)),
        )
        for i in range(number)
    ]


def kv_tokens(talks: Sequence[Talk], share: float, longest: int) -> int:
    """Return the tokens of a KV cache for this share of the conversations, at their ends.
    `longest`: most tokens of a sequence, for which there is always room."""
    num_blocks = sum(-(-talk.num_tokens // CPU_BLOCK_TOKENS) for talk in talks)
    # vLLM keeps one block for itself.
    return max(longest, round(share * num_blocks) * CPU_BLOCK_TOKENS) + CPU_BLOCK_TOKENS
