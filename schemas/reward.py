"""Settings of scoring: a scorer that refrain ships, or your own function."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, WithJsonSchema

from refrain.schemas.base import Frozen
from refrain.schemas.resume import Free


class BuiltinReward(Frozen):
    """A scorer that refrain ships, chosen by each row's `data_source`.

    A response scores 0 if comparing its answer takes too much time or memory; `critic/num_unscored`
    counts such responses.
    """

    group: ClassVar[bool] = False
    type: Literal["builtin"] = "builtin"
    """`builtin`: a scorer that refrain ships, by each row's `data_source`. `function`: your own.
    `environment`: the score that `environment.path` gives."""
    timeout_s: Free[PositiveFloat] = 60.0
    """Longest time in seconds to score one response, for example `120`. Raise it for a scorer that
    needs longer, such as a judge behind a URL."""


class FunctionReward(Frozen):
    """Your own `compute_score(data_source, solution_str, ground_truth, extra_info=None)`.

    With `group`: `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`, as for
    veRL's batch reward manager.
    """

    type: Literal["function"] = "function"
    path: Path
    """Python file that defines your function, for example `my_reward.py`."""
    function: str = "compute_score"
    """Name of your function, for example `score_math`. Change it if the file calls it so."""
    kwargs: dict[str, SecretStr | int | float | bool] = {}
    """Extra keyword arguments for every call, for example `{model: judge}`. Set them if your
    function takes more arguments. No record shows their text, as it may be an API key."""
    group: bool = False
    """Whether one call scores all responses to a prompt: your function takes four lists and returns
    a list of scores. Switch it on if a score depends on the other responses, as a judge's ranking
    does. A step then waits for all its samples."""
    timeout_s: Free[PositiveFloat] = 60.0
    """Longest time in seconds of one call, for example `120`. A call scores one response, with
    `group` all responses to a prompt. Raise it for a scorer that needs longer, such as a judge
    behind a URL."""
    on_error: Free[Literal["stop", "retry", "zero"]] = "stop"
    """Action after an exception, a time-out, a dead process or a bad value. `stop`: the run ends
    and names the response. `retry`, as for a judge behind a URL: score again, up to 8 times, after
    waits of up to half a minute; then the run ends. `zero`, as for code that a model wrote: the
    reward is 0. `critic/num_retried` and `critic/num_unscored` count such responses."""
    environment: Free[tuple[str, ...]] = ()
    """Environment variables that your function sees, for example `[OPENAI_API_KEY]`. Name those
    that it reads. It always sees those that say where things are (`PATH`, `HOME`, `LANG`, `PYTHON*`
    and the like)."""
    max_memory_bytes: Free[PositiveInt | None] = None
    """Memory in bytes that each process of your function may allocate (RLIMIT_DATA), without
    libraries and mapped files. For example, 2000000000 (2 GB). Set it if your function runs code
    that may take all memory. Default: no limit."""

    @property
    def arguments(self) -> dict[str, str | int | float | bool]:
        """Extra keyword arguments with their secrets in plain text."""
        return {
            name: value.get_secret_value() if isinstance(value, SecretStr) else value
            for name, value in self.kwargs.items()
        }


class EnvironmentReward(Frozen):
    """The score that the run's environment gives at the end of a conversation (`environment`)."""

    group: ClassVar[bool] = False
    type: Literal["environment"] = "environment"


JSON_ONLY = ("kwargs", "group", "on_error", "environment", "max_memory_bytes")
"""Settings that only the JSON view of the form takes."""


def _reward_form() -> dict[str, Any]:
    """Return a schema for the form: one object with the fields of both classes.

    Prefect's form shows a union as a JSON editor, and its JSON view then refuses the content. The
    schema leaves out defaults that the form would always send, and settings that few need.
    """
    fields = FunctionReward.model_json_schema()["properties"]
    for name in JSON_ONLY:
        del fields[name]
    del fields["function"]["default"]
    fields["type"] = {
        "title": "Type",
        "enum": ["builtin", "function", "environment"],
        "default": "builtin",
        "description": (
            "`builtin`: a scorer by each row's `data_source`. `function`: your own. `environment`: "
            "the environment's score."
        ),
    }
    fields["path"]["description"] = "`function`: the Python file that defines your function."
    fields["function"]["description"] = (
        "`function`: name of your function. Default: `compute_score`. The JSON view also takes "
        "its `kwargs`, `group`, `environment`, `max_memory_bytes` and `on_error`."
    )
    return {"title": "Reward", "type": "object", "properties": fields}


RewardConfig = Annotated[
    BuiltinReward | FunctionReward | EnvironmentReward,
    Field(discriminator="type"),
    WithJsonSchema(_reward_form(), mode="validation"),
]
