"""Settings of an environment, and what travels between a policy's turns and an environment."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr

from refrain.schemas.base import Frozen
from refrain.schemas.resume import Free


class EnvironmentConfig(Frozen):
    """Your own tools or environment: a Python file that imports nothing of refrain."""

    path: Path
    """Python file that defines your tools or your class, for example `my_tools.py`. Each node of a
    cluster reads it under the same path."""
    name: str | None = None
    """Name of your class, your function or your list of tools, for example `Guess`. Set it if the
    file has several. Default: the only class with `step` or `run`, or the function `run`, else the
    list `tools`."""
    kwargs: dict[str, SecretStr | int | float | bool] = {}
    """Keyword arguments of your class, for example `{highest: 20}`. Set them if it takes arguments.
    No record shows their text, as it may be an API key."""
    python: Free[Path | None] = None
    """Python interpreter (3.9 or later) that runs your file, for example `/venv/bin/python`. Set it
    if your file needs packages that conflict with refrain's. Default: refrain's interpreter."""
    parser: str = "hermes"
    """Format of tool calls. `hermes`: JSON in `<tool_call>` tags, as Qwen2.5 and Qwen3 write them.
    For other models, the name of vLLM's parser, for example `llama3_json`. vLLM takes a call that
    it cannot read as text."""
    max_turns: PositiveInt = 8
    """Most turns of the policy in a conversation, for example `4`. Lower it if conversations go on
    without an end."""
    max_turn_tokens: PositiveInt | None = None
    """Most tokens that the policy may write in one turn, for example `512`. Set it if a turn should
    not use up the response. Default: no limit but `data.max_response_tokens`."""
    max_observation_tokens: PositiveInt = 1024
    """Most tokens of one observation, for example `4096`. Longer contents are cut, and say so.
    Raise it for tools with long answers, such as a search."""
    max_calls: PositiveInt = 8
    """Most tool calls in one turn, for example `1`. A turn with more calls runs none of them, and
    the observation gives the limit."""
    timeout_s: Free[PositiveFloat] = 30.0
    """Longest time in seconds of one call of your code (`reset`, `step`, `end`, `close`, and `run`
    between two turns), for example `120`. Raise it for slow tools."""
    max_wait_s: PositiveFloat | None = None
    """Longest time in seconds that a conversation may wait for your code in all, for example `600`.
    Then it ends. Set it if slow conversations should not hold up a step. Default: no limit."""
    processes: Free[PositiveInt | None] = None
    """Processes that run your file on each node, for example `2`: on two nodes, four in all. Lower
    it if each process needs much memory. Default: one per core, at most 8."""
    at_once: Free[PositiveInt] = 32
    """Most calls of your code at the same time in one process, for example `1`. The run makes at
    most nodes x `processes` x `at_once` calls. Lower it to 1 if your code is not safe in
    threads."""
    retries: Free[NonNegativeInt] = 1
    """How often a failed call is tried again, in a conversation rebuilt from its turns, for example
    `3`. Raise it for tools that fail now and then, such as a search behind a URL."""
    on_error: Free[Literal["stop", "zero", "leave_out"]] = "stop"
    """Action after the last retry. `stop`: the run ends and names the conversation. `zero`: the
    response ends there, and its reward is 0. Choose `zero` if the policy itself can make your
    environment fail. `leave_out`: the response has no reward, and neither training nor its group's
    mean knows it. Choose `leave_out` if other causes make it fail, such as a service that is down.
    In validations such a response counts as 0."""
    variables: Free[tuple[str, ...]] = ()
    """Environment variables that your code sees, for example `[OPENAI_API_KEY]`. Name those that it
    reads. It always sees those that say where things are (`PATH`, `HOME`, `LANG`, `PYTHON*` and the
    like)."""
    max_memory_bytes: Free[Annotated[int, Field(ge=2**26)] | None] = None
    """Memory in bytes that each process of your code may allocate (RLIMIT_DATA), without libraries
    and mapped files. For example, 2000000000 (2 GB). Set it if a tool runs code that may take all
    memory. Default: no limit."""

    @property
    def arguments(self) -> dict[str, str | int | float | bool]:
        """Keyword arguments with their secrets in plain text."""
        return {
            name: value.get_secret_value() if isinstance(value, SecretStr) else value
            for name, value in self.kwargs.items()
        }


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
    """What an environment learns of a prompt when a conversation starts."""

    prompt_key: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    seed: int
    """Seed of the prompt in this step. All samples of a group have the same."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of the prompt, as `{"role": "user", "content": "1+1=?"}`."""


@dataclass(frozen=True, slots=True)
class EnvironmentAnswer:
    """An environment's answer to a turn."""

    messages: tuple[dict[str, str], ...] = ()
    """Observed messages: `role`, `content`, and for a tool its `name`. Empty if it ended."""
    score: float | None = None
    """Score of this turn. None: the environment gave none."""
    ended: bool = False
    """Whether the conversation is over."""
    num_calls: int = 0
    """Tool calls that were executed or refused."""
    num_failed_calls: int = 0
    """Tool calls that raised or had wrong arguments."""
