"""Environments: their settings, and what travels between them and a policy's turns."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from schemas.base import Frozen
from schemas.resume import Free


class EnvironmentConfig(Frozen):
    """Tools that the policy may call, or an environment that answers its turns. Both are a Python
    file of yours, which imports nothing of refrain."""

    path: Path
    """Python file with your tools or your environment, for example `calculator.py`."""
    name: str | None = None
    """Name of the class in the file, for example `Guess`. Default: its only class with a method
    `step`, else its list `tools`. Set it if the file has several."""
    max_turns: PositiveInt = 8
    """Most turns of the policy in a conversation, for example `4`. A longer one ends, with finish
    reason `turns`. Raise it if many end so."""
    max_turn_tokens: PositiveInt | None = None
    """Most tokens that the policy samples in one turn, for example `512`. A longer turn ends the
    conversation with finish reason `length`, and its calls are not executed. Set it if single turns
    use up the response. Default: `data.max_response_tokens` bounds all turns together."""
    max_observation_tokens: PositiveInt = 1024
    """Most tokens of an answer of the environment, for example `256`. Longer texts are cut, and say
    so. Raise it if your tools return long texts that matter."""
    max_calls: PositiveInt = 8
    """Most tool calls of a turn, for example `1`. More are not executed, and the policy is told."""
    timeout_s: Free[PositiveFloat] = 30.0
    """Longest time in seconds for one answer, for example `120`. Raise it if your tools need
    longer."""
    max_wait_s: PositiveFloat | None = None
    """Longest time in seconds that a conversation may wait for answers, all turns together, for
    example `300`. A longer one ends, with finish reason `time`. Default: no limit."""
    processes: Free[PositiveInt | None] = None
    """Processes that run your code, for example `4`. Raise it if its own computing takes long.
    Default: one for each core, at most 8."""
    at_once: Free[PositiveInt] = 32
    """Calls that one process runs at the same time, in threads or as coroutines. For example, `1`
    for code that is not thread-safe."""
    retries: Free[int] = Field(default=1, ge=0)
    """How often a failed conversation is repeated in a fresh environment, for example `3` for tools
    behind an unreliable network."""
    on_error: Literal["stop", "zero"] = "stop"
    """What follows when a conversation has failed for good. `stop`: the run ends and says why.
    `zero`: the response ends there, and its score is 0. Choose `zero` if the policy itself can make
    your environment fail."""
    environment: Free[tuple[str, ...]] = ()
    """Environment variables that your code sees, for example `[SEARCH_API_KEY]`. It always sees
    those that say where things are, such as `PATH` and `HOME`."""
    max_memory_bytes: Free[PositiveInt | None] = None
    """Memory in bytes that each process of your code may allocate, for example 2000000000 (2 GB).
    Default: no limit."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that a policy wrote."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TurnText:
    """A turn of the policy as text."""

    text: str
    """The whole turn, its calls and its thinking included."""
    calls: tuple[ToolCall, ...] = ()
    """Calls in the order in which the policy wrote them. Empty if there is a problem."""
    problem: str | None = None
    """Sentences that tell the policy how to correct its calls. None if they can be executed."""


@dataclass(frozen=True, slots=True)
class EnvironmentTask:
    """What the environment of a sample starts with."""

    prompt_key: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    seed: int
    """The same for all samples of a prompt in a step, so that a group has one start."""


@dataclass(frozen=True, slots=True)
class EnvironmentAnswer:
    """An environment's answer to a turn."""

    messages: tuple[dict[str, str], ...] = ()
    """Messages to add to the conversation. Empty if it has ended."""
    score: float | None = None
    """Score of the turn; of the whole conversation, if it has ended. None: it gave none."""
    num_calls: int = 0
    num_failed_calls: int = 0
    """Tool calls that raised an exception."""

    @property
    def ended(self) -> bool:
        """Whether the conversation has ended."""
        return not self.messages


@dataclass(frozen=True, slots=True)
class EnvironmentSetup:
    """What a file with an environment declares."""

    tools: tuple[dict[str, Any], ...]
    """JSON schemas of the tools, for a chat template."""
    has_class: bool
    """Whether there is a class with `step`. Otherwise there are tools alone."""
    replays: bool
    """Whether the same steps bring an environment to the same state."""
