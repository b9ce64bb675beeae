"""The tools of a request, and which of them the model may or must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from ..json_schemas import guided, strict_fault
from .fields import Body, invalid
from .output_format import object_with

MAX_TOOLS = 128
Mode = Literal["none", "auto", "required"]


def _object(value: Any) -> Any:
    if value is not None and not isinstance(value, dict):
        raise invalid("must be a JSON schema, an object")
    return value


class Function(Body):
    """What a tool is called with; ``parameters`` is a JSON schema. ``strict``: also a call that the model
    need not make follows it."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[
        Any, BeforeValidator(_object), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})
    ] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_strict_form(self) -> Self:
        if self.strict and self.parameters and (fault := strict_fault(self.parameters)):
            raise invalid(f"its parameters cannot be strict: {fault}")
        return self


class Tool(Body):
    """One tool: functions are all there is."""

    type: Literal["function"]
    function: Function


class ToolChoice(NamedTuple):
    """``names``: those that may be called, None: all that there are. ``one``: one call and no more."""

    mode: Mode
    names: frozenset[str] | None = None
    one: bool = False


def check_tool_choice(value: Any) -> ToolChoice | None:
    """Return the choice of ``tool_choice``. Raises PydanticCustomError."""
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", frozenset([name]), one=True)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            return ToolChoice(mode, frozenset(map(_allowed_name, tools)))
    raise invalid(
        'must be \'none\', \'auto\', \'required\', {"type": "function", "function": {"name": "..."}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
    )


def check_function_call(value: Any) -> ToolChoice | None:
    """Return the choice of ``function_call``, the older field. Raises PydanticCustomError."""
    match value:
        case None:
            return None
        case "none" | "auto":
            return ToolChoice(value, one=True)
        case {"name": str(name)}:
            return ToolChoice("required", frozenset([name]), one=True)
    raise invalid("must be 'none', 'auto' or {\"name\": \"...\"}")


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise invalid('allowed tools must be {"type": "function", "function": {"name": "..."}}')


_FUNCTION = object_with({"name": {"type": "string"}})
_NAMED = object_with({"type": {"const": "function"}, "function": _FUNCTION})
_TOOLS = {"type": "array", "items": _NAMED, "minItems": 1}
_ALLOWED = object_with({"mode": {"enum": ["auto", "required"]}, "tools": _TOOLS})
_LIMITED = object_with({"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED})
TOOL_CHOICE = WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED, _LIMITED]})
FUNCTION_CALL = WithJsonSchema({"anyOf": [{"enum": ["none", "auto", None]}, _FUNCTION]})


def parameters_of(tool: Tool) -> str:
    """Return the JSON text of the schema of its arguments for llguidance: always an object, without any where
    none are declared."""
    own = tool.function.parameters or {"properties": {}}
    return guided({"type": "object", **own}, lenient=not tool.function.strict)
