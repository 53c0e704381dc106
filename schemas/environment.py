"""What travels between a policy's turns and an environment."""

from dataclasses import dataclass
from typing import Any


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
