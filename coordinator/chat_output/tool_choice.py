"""The tools of a request: which of them the model may or must call, and the grammar that holds it to that."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_TOOLS = 128
Mode = Literal["none", "auto", "required"]
_STRICT = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)


def _object(value: Any) -> Any:
    if value is not None and not isinstance(value, dict):
        raise PydanticCustomError("invalid", "must be a JSON schema, an object")
    return value


class Function(BaseModel):
    """What a tool is called with; ``parameters`` is a JSON schema."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[Any, BeforeValidator(_object), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})] = None
    strict: bool | None = None


class Tool(BaseModel):
    """One tool: functions are all there is."""

    model_config = _STRICT

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    model_config = _STRICT

    name: str


class NamedTool(BaseModel):
    """``tool_choice`` as an object: this function and no other."""

    model_config = _STRICT

    type: Literal["function"]
    function: FunctionName


def check_tool_choice(value: Any) -> Mode | NamedTool | None:
    """Of the field's value. Raises PydanticCustomError."""
    if value is None or value in ("none", "auto", "required"):
        mode: Mode | None = value
        return mode
    name = value.get("function", {}) if isinstance(value, dict) and value.get("type") == "function" else None
    if isinstance(name, dict) and isinstance(name.get("name"), str):
        return NamedTool(type="function", function=FunctionName(name=name["name"]))
    raise PydanticCustomError(
        "invalid", 'must be \'none\', \'auto\', \'required\' or {{"type": "function", "function": {{"name": "..."}}}}'
    )


TOOL_CHOICE = WithJsonSchema(
    {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
                },
            },
        ]
    }
)


def parameters_of(tool: Tool) -> str:
    """The JSON text of the schema of its arguments: an object, whatever was left unsaid."""
    return orjson.dumps({"type": "object", **(tool.function.parameters or {})}).decode()
