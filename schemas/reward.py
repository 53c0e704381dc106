"""Who scores the responses: a scorer that refrain ships, or a user's own function."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, WithJsonSchema

from schemas.base import Frozen
from schemas.resume import Free


class BuiltinReward(Frozen):
    """A scorer that refrain ships, chosen by each row's `data_source`."""

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
    kwargs: dict[str, str | int | float | bool] = {}
    """Further keyword arguments for every call."""
    timeout_s: Free[PositiveFloat] = 60.0
    """Longest time for one response."""


def _reward_form() -> dict[str, Any]:
    """One object with the fields of both, as Prefect's form has a JSON editor for a union, and its
    JSON view then refuses what stands there. Without `kwargs`, which it would always send."""
    fields = FunctionReward.model_json_schema()["properties"]
    del fields["kwargs"], fields["function"]["default"]
    fields["type"] = {
        "title": "Type",
        "enum": ["builtin", "function"],
        "default": "builtin",
        "description": "`builtin`: a scorer by each row's `data_source`. `function`: your own.",
    }
    fields["path"]["description"] = "`function`: the Python file that defines it."
    fields["function"]["description"] = (
        "`function`: its name. Default: `compute_score`. `kwargs` for it can be given in the JSON "
        "view."
    )
    return {"title": "Reward", "type": "object", "properties": fields}


RewardConfig = Annotated[
    BuiltinReward | FunctionReward,
    Field(discriminator="type"),
    WithJsonSchema(_reward_form(), mode="validation"),
]
