"""Who scores the responses: a scorer that refrain ships, or a user's own function."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, WithJsonSchema

from schemas.base import Frozen
from schemas.resume import Free


class BuiltinReward(Frozen):
    """A scorer that refrain ships, chosen by each row's `data_source`.

    A response whose answer takes too long or too much memory to compare scores 0, and
    `critic/num_unscored` counts it.
    """

    type: Literal["builtin"] = "builtin"
    timeout_s: Free[PositiveFloat] = 60.0
    """Longest time for one response."""


class FunctionReward(Frozen):
    """A user's own `compute_score(data_source, solution_str, ground_truth, extra_info=None)`."""

    type: Literal["function"] = "function"
    path: Path
    """Python file that defines the function."""
    function: str = "compute_score"
    """Name of the function."""
    kwargs: dict[str, SecretStr | int | float | bool] = {}
    """Further keyword arguments for every call. Text among them may be a key: no record has it."""
    timeout_s: Free[PositiveFloat] = 60.0
    """Longest time for one response."""
    on_error: Free[Literal["stop", "retry", "zero"]] = "stop"
    """Meaning of an exception, a time-out, a dead process or a bad value for its response.
    `stop`: the run ends and names it. `retry`: it is scored again after a wait that doubles, up to
    half a minute, and the run ends if that does not help. `zero`: its reward is 0. The record says
    of how many: `critic/num_retried`, `critic/num_unscored`."""
    max_retries: Free[PositiveInt] = 8
    """Times that one response is scored again, with `on_error: retry`."""
    environment: Free[tuple[str, ...]] = ()
    """Names of environment variables that the function sees, such as `OPENAI_API_KEY`, besides
    those that say where things are (`PATH`, `HOME`, `LANG`, `PYTHON*` and the like)."""
    max_memory_bytes: Free[PositiveInt | None] = None
    """Memory of its own that each process of the function may have (RLIMIT_DATA), libraries and
    files in memory aside. Default: no limit."""
    max_processes: Free[PositiveInt | None] = None
    """Processes and threads that the user who runs refrain may have, as Linux counts them
    (RLIMIT_NPROC), all others of that user included; root is not limited. Default: no limit."""
    max_file_bytes: Free[PositiveInt | None] = None
    """Largest file that the function may write (RLIMIT_FSIZE). Default: no limit."""

    @property
    def arguments(self) -> dict[str, str | int | float | bool]:
        """Further keyword arguments, in the clear."""
        return {
            name: value.get_secret_value() if isinstance(value, SecretStr) else value
            for name, value in self.kwargs.items()
        }


JSON_ONLY = (
    "kwargs", "on_error", "max_retries", "environment",
    "max_memory_bytes", "max_processes", "max_file_bytes",
)  # fmt: skip
"""Settings that the form has no fields for; its JSON view takes them."""


def _reward_form() -> dict[str, Any]:
    """One object with the fields of both, as Prefect's form has a JSON editor for a union, and its
    JSON view then refuses what stands there. Without what it would always send, and what few need.
    """
    fields = FunctionReward.model_json_schema()["properties"]
    for name in JSON_ONLY:
        del fields[name]
    del fields["function"]["default"]
    fields["type"] = {
        "title": "Type",
        "enum": ["builtin", "function"],
        "default": "builtin",
        "description": "`builtin`: a scorer by each row's `data_source`. `function`: your own.",
    }
    fields["path"]["description"] = "`function`: the Python file that defines it."
    fields["function"]["description"] = (
        "`function`: its name. Default: `compute_score`. `kwargs` for it, limits of its "
        "processes and what an error means can be given in the JSON view."
    )
    return {"title": "Reward", "type": "object", "properties": fields}


RewardConfig = Annotated[
    BuiltinReward | FunctionReward,
    Field(discriminator="type"),
    WithJsonSchema(_reward_form(), mode="validation"),
]
