"""Tools of a user: their JSON schemas from signature and docstring, and their calls.

    def multiply(a: int, b: int = 2) -> int:        {"name": "multiply",
        "Product of two numbers."          ─►        "description": "Product of two numbers.",
                                                     "parameters": {... "required": ["a"]}}

A call with wrong arguments is not executed: the problem is its observation. So is the exception of
a tool. Workers import this module: see
`engines/user_code/importing.py`.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Union

from ..user_code.importing import UserFault, message_of, shown

PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
UNIONS = {Union, getattr(types, "UnionType", Union)}
"""Origins of `Optional[int]` and, from Python 3.10 on, of `int | None`."""
MAX_DEPTH = 8
"""Deepest nesting of an annotation."""
Function = Callable[..., Any]


class Tool(NamedTuple):
    """A function that the policy may call."""

    name: str
    function: Function
    hints: dict[str, Any]
    """Type of each parameter. Those without an annotation are missing."""
    signature: inspect.Signature
    """Without `self`."""
    is_method: bool

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema, as chat templates take it."""
        parameters = self.signature.parameters
        required = [n for n, one in parameters.items() if one.default is one.empty]
        properties = {n: _with_default(self, one) for n, one in parameters.items()}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(self.function) or "",
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": required,
                },
            },
        }


def declared_tools(functions: Iterable[Any], owner: type | None = None) -> dict[str, Tool]:
    """Return tools by name. `owner`: class whose methods may be among them. Raises UserFault for a
    function that cannot be a tool."""
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = _tool(function, owner)
        if tool.name in tools:
            raise UserFault(f"two tools are called {tool.name}: rename one")
        tools[tool.name] = tool
    return tools


def declared_schemas(tools: Iterable[Any], owner: type | None = None) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools: of functions, or written by the user. `owner` and errors:
    as for `declared_tools`."""
    schemas: dict[str, dict[str, Any]] = {}
    for one in tools:
        schema = _own_schema(one) if isinstance(one, Mapping) else _tool(one, owner).schema
        name = schema["function"]["name"]
        if name in schemas:
            raise UserFault(f"two tools are called {name}: rename one")
        schemas[name] = schema
    return list(schemas.values())


def _own_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    function = schema.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserFault(
            f"the tool {shown(schema)} is no schema of a function: write "
            '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
        )
    try:
        return json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserFault(f"the tool {function['name']} cannot be written as JSON: {error}") from None


def call_problem(tool: Tool, arguments: Any) -> str | None:
    """Return why a call cannot be executed, for the policy to read. None: it can."""
    if not isinstance(arguments, Mapping):
        return f"The arguments of {tool.name} must be an object, not {shown(arguments)}."
    parameters = tool.signature.parameters
    if unknown := [name for name in arguments if name not in parameters]:
        takes = ", ".join(parameters) or "no arguments"
        return f"{tool.name} has no argument {unknown[0]!r:.80}. It takes {takes}."
    for name, parameter in parameters.items():
        if name not in arguments:
            if parameter.default is parameter.empty:
                return f"{tool.name} needs the argument {name!r}."
        elif not fits(arguments[name], tool.hints.get(name, Any)):
            wanted = json.dumps(schema_of(tool.hints[name]))
            found = json.dumps(arguments[name], default=str)[:80]
            return f"The argument {name!r} of {tool.name} is {found}, but must be {wanted}."
    return None


def observation_of(result: Any) -> str:
    """Return a tool's result as text: text as it is, all else as JSON where possible."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def failure_of(error: BaseException) -> str:
    """Return a tool's exception as the observation of its call."""
    return f"Error: {error if isinstance(error, UserFault) else message_of(error)}"


def schema_of(hint: Any, depth: int = 0) -> dict[str, Any]:
    """Return the JSON schema of an annotation. Raises UserFault for types that JSON lacks."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, inspect.Parameter.empty):
        return {}
    if depth <= MAX_DEPTH:
        inner = [one for one in parts if one is not type(None)]
        if hint in PLAIN:
            return {"type": PLAIN[hint]}
        if hint is list or origin is list:
            return {"type": "array", "items": schema_of(parts[0], depth + 1) if parts else {}}
        if hint is dict or origin is dict:
            return {"type": "object"}
        if origin is typing.Literal:
            return {"enum": list(parts)}
        if origin in UNIONS and len(inner) == 1:
            return schema_of(inner[0], depth + 1)
        if origin in UNIONS:
            return {"anyOf": [schema_of(one, depth + 1) for one in inner]}
    raise UserFault(
        f"{hint} cannot be written as JSON: use str, int, float, bool, list, dict, Optional or "
        "Literal"
    )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of a call's JSON has the type of an annotation."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint in PLAIN:
        return type(value) is hint
    if hint is list or origin is list:
        return isinstance(value, list) and all(fits(one, (*parts, Any)[0]) for one in value)
    if hint is dict or origin is dict:
        return isinstance(value, dict) and all(
            fits(v, (*parts, Any, Any)[1]) for v in value.values()
        )
    if origin is typing.Literal:
        return any(type(one) is type(value) and one == value for one in parts)
    return any(fits(value, one) for one in parts)


def _tool(function: Any, owner: type | None) -> Tool:
    if not inspect.isroutine(function):
        raise UserFault(f"the tool {shown(function)} is not a function: list functions")
    name = function.__name__
    is_method = (
        owner is not None
        and inspect.isfunction(vars(owner).get(name))
        and (vars(owner)[name] is function)
    )
    signature = inspect.signature(function)
    if is_method:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    try:
        hints = typing.get_type_hints(function)
        for parameter in signature.parameters.values():
            _check_parameter(parameter)
            schema_of(hints.get(parameter.name, Any))
    except UserFault as error:
        raise UserFault(f"the tool {name}: {error}") from None
    except Exception as error:
        raise UserFault(f"the tool {name} has unusable annotations: {message_of(error)}") from error
    return Tool(name, function, hints, signature, is_method)


def _check_parameter(parameter: inspect.Parameter) -> None:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise UserFault(f"{parameter} cannot be given by name: use plain parameters")


def _with_default(tool: Tool, parameter: inspect.Parameter) -> dict[str, Any]:
    schema = schema_of(tool.hints.get(parameter.name, Any))
    has_plain_default = isinstance(parameter.default, (str, int, float, bool))
    return {**schema, "default": parameter.default} if has_plain_default else schema
