"""Tools of a user's environment: their schemas and their calls. A part of the script `worker.py`,
which imports nothing of refrain."""

import asyncio
import inspect
import json
import typing
from types import SimpleNamespace

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


class BadTool(Exception):
    """A tool whose schema cannot be made."""


class ToolCallProblem(Exception):
    """A call that cannot be executed. The message is for the policy."""


class PolicyTurn:
    """A turn of the policy, as `step` gets it."""

    def __init__(self, text, calls, problem, number, tools):
        self.text = text
        """What the policy wrote, calls and thinking included."""
        self.calls = [SimpleNamespace(**call) for call in calls]
        """Its tool calls: `.name` and `.arguments`."""
        self.problem = problem
        """Why its tool calls cannot be executed, or None."""
        self.number = number
        """The turn, from 1."""
        self._tools = tools
        self.num_calls = self.num_failed_calls = 0

    def run(self):
        """Execute the calls in order. Return a message of role `tool` for each."""
        if self.problem:
            return [{"role": "tool", "content": self.problem}]
        return [self._message(call) for call in self.calls]

    def _message(self, call):
        self.num_calls += 1
        try:
            content = self._called(call)
        except ToolCallProblem as problem:
            self.num_failed_calls += 1
            content = str(problem)
        except Exception as error:
            self.num_failed_calls += 1
            content = f"{type(error).__name__}: {error}"
        return {"role": "tool", "name": call.name, "content": content}

    def _called(self, call):
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolCallProblem(
                f"There is no tool {call.name!r}. There are: {', '.join(self._tools)}."
            )
        arguments = fitted(tool, call.arguments)
        result = tool(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait_for(result))
        return result if isinstance(result, str) else json.dumps(result, default=str)


async def _wait_for(result):
    return await result


def fitted(tool, arguments):
    """Return the arguments as the tool declares them. Raise ToolCallProblem if they do not fit."""
    signature = inspect.signature(tool)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ToolCallProblem(f"{tool.__name__}{signature}: {error}.") from None
    hints = hints_of(tool)
    return {name: _fitted(tool, name, hints.get(name), value) for name, value in arguments.items()}


def _fitted(tool, name, hint, value):
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kinds = {str: str, int: int, float: float, bool: bool, list: list, dict: dict}
    kind = kinds.get(typing.get_origin(hint) or hint)
    if kind and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
        wanted = JSON_TYPES.get(kind, kind.__name__)
        raise ToolCallProblem(
            f"{tool.__name__}: {name} must be of type {wanted}, not {value!r:.80}."
        )
    return value


def hints_of(function):
    try:
        return typing.get_type_hints(function)
    except Exception:
        return {}


def schema_of(tool):
    """Return a tool's JSON schema, from its signature and docstring."""
    properties, required = {}, []
    hints = hints_of(tool)
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadTool(f"tool {tool.__name__}: give {name} a name of its own, not * or **")
        properties[name] = type_of(hints.get(name))
        if parameter.default is parameter.empty:
            required.append(name)
    function = {
        "name": tool.__name__,
        "description": inspect.getdoc(tool) or "",
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": function}


def type_of(hint):
    """Return the JSON schema of a type; an empty one accepts anything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if hint is list or origin is list:
        return {"type": "array", **({"items": type_of(arguments[0])} if arguments else {})}
    if hint is dict or origin is dict:
        return {"type": "object"}
    others = [one for one in arguments if one is not type(None)]
    return type_of(others[0]) if len(others) == 1 and len(arguments) == 2 else {}
