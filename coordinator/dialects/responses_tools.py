"""The tools of /v1/responses, and the chat's functions that they stand for.

A custom tool, whose input is text, is a function with the one argument ``input``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..generate.bodies.fields import invalid
from .chat_stream import object_of

Tool = dict[str, Any]
HOSTED = ("web_search", "web_search_preview", "web_search_2025_08_26")
"""Tools of OpenAI's own that clients offer without being asked to. They are left out: no model here can call
them. Others are refused."""
CALLED = ("function", "custom")
OFFERED = (*CALLED, "namespace")
NEUTRAL: dict[str, tuple[Any, ...]] = {"async": (False,), "allowed_callers": (["direct"],)}
"""Fields of tools that are not built, with the values that change nothing."""
KNOWN = {"type", "name", "description", "parameters", "strict", "format", "tools", *NEUTRAL}
IGNORED_OF_TOOLS = {
    "defer_loading": "tools that are shown later: all are shown at once",
    "output_schema": "what the client's own tool returns",
}
"""By name: what it is about, which is why it cannot change an answer."""
INPUT = "input"


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise PydanticCustomError for a tool that is not built."""
    for i, tool in enumerate(tools):
        _check(tool, f"tools[{i}]")


def offered(tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools that the model is offered; those of a namespace have its name as ``namespace``."""
    found: list[Tool] = []
    for tool in tools:
        if tool["type"] == "namespace":
            found += [{**inner, "namespace": tool["name"]} for inner in tool["tools"]]
        elif tool["type"] in CALLED:
            found.append(tool)
    return found


def unknown_of_tools(tools: Sequence[Tool]) -> list[str]:
    """Return the paths of unknown fields."""
    return [
        f"tools[{i}].{name}"
        for i, tool in enumerate(tools)
        if tool["type"] in OFFERED
        for name in sorted({*tool} - KNOWN - {*IGNORED_OF_TOOLS})
    ]


def chat_name(tool: Tool) -> str:
    """Return a tool's name for the model: after that of its namespace, if it is in one."""
    namespace, name = tool.get("namespace"), tool.get("name")
    return f"{namespace}.{name}" if namespace else str(name)


def chat_tool(tool: Tool) -> Tool:
    """Return the chat's tool."""
    function: dict[str, Any] = {"name": chat_name(tool)}
    if tool["type"] == "custom":
        pattern = (tool.get("format") or {}).get("definition")
        text = {"type": "string", **({} if pattern is None else {"pattern": f"^(?:{pattern})$"})}
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
        tool = {
            **tool,
            "parameters": {**parameters, "additionalProperties": False},
            "strict": pattern is not None,
        }
    names = ("description", "parameters", "strict")
    return {"type": "function", "function": function | {n: tool[n] for n in names if tool.get(n) is not None}}


def chat_choice(choice: str | Tool | None) -> Any:
    """Return the chat's ``tool_choice``; what it does not know is passed on, and refused there."""
    match choice:
        case {"type": "function" | "custom", "name": name, **more}:
            named = {"name": name, "namespace": more.get("namespace")}
            return {"type": "function", "function": {"name": chat_name(named)}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            allowed = {"mode": mode, "tools": [*map(chat_choice, tools)]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def arguments_of(text: str) -> str:
    """Return the arguments of the function that a custom tool is."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the input of a custom tool; the arguments as they are where a limit of tokens has cut them."""
    text = object_of(arguments).get(INPUT)
    return text if isinstance(text, str) else arguments


def _check(tool: Any, path: str) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind in HOSTED:
        return
    if kind not in OFFERED:
        raise invalid(
            f"{path}.type: this server runs no tool of type {kind!r}; the client's own tools are of type "
            f"{', '.join(OFFERED)}"
        )
    if not isinstance(tool.get("name"), str):
        raise invalid(f"{path}.name: must be a string")
    for name, values in NEUTRAL.items():
        if (value := tool.get(name)) is not None and value not in values:
            raise invalid(f"{path}.{name}: is not built on this server; leave it out")
    if kind == "custom":
        _check_format(tool.get("format"), f"{path}.format")
    elif kind == "namespace":
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
            raise invalid(f"{path}.tools: must be a list of tools")
        for i, each in enumerate(inner):
            if each.get("type") not in CALLED:
                raise invalid(f"{path}.tools[{i}].type: must be one of {', '.join(CALLED)}")
            _check(each, f"{path}.tools[{i}]")


def _check_format(format_: Any, path: str) -> None:
    match format_:
        case None | {"type": "text"} | {"type": "grammar", "syntax": "regex", "definition": str()}:
            return
        case {"type": "grammar", "syntax": "lark"}:
            raise invalid(f"{path}.syntax: an input within a call cannot follow a Lark grammar; use 'regex'")
    raise invalid(
        f'{path}: must be {{"type": "text"}} or {{"type": "grammar", "syntax": "regex", "definition": "..."}}'
    )
