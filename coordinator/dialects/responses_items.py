"""The items of /v1/responses, and the chat messages they stand for."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import WrongField
from ..generate.bodies.content import DETAILS, NO_URL, is_address, is_data
from .responses_tools import arguments_of, chat_name

Item = dict[str, Any]
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
"""How the ids of items begin, by type."""
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The field with the text of a content part, by type."""
IMAGE = "input_image"
ROLES = ("user", "assistant", "system", "developer")
OPEN_THOUGHT = "plain:"
"""Begins ``encrypted_content``: thoughts are no secret here. Clients that store nothing return them in it."""


def new_id(kind: str) -> str:
    """Return a new id of an item of this type."""
    return f"{PREFIXES[kind]}_{secrets.token_hex(16)}"


def items_of(given: str | Sequence[Any]) -> list[Item]:
    """Return the items of ``input``, each with its type and an id. Raises InvalidRequest."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_checked(i, item) for i, item in enumerate(given)]


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the chat messages of a conversation. Calls and thoughts join the assistant's message beside
    them."""
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            thought += _thought(item)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        else:
            open_one = messages and messages[-1]["role"] == "assistant" and not thought
            if not open_one or (kind == "message" and "tool_calls" in messages[-1]):
                messages.append({"role": "assistant", "content": ""})
            if thought:
                messages[-1]["reasoning_content"], thought = thought, ""
            if kind == "message":
                messages[-1]["content"] += _text(item["content"])
            else:
                arguments = item["arguments"] if kind == "function_call" else arguments_of(item["input"])
                function = {"name": chat_name(item), "arguments": arguments}
                call = {"id": item["call_id"], "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def encrypted(thought: str) -> str:
    """Return a thought as ``encrypted_content``."""
    return OPEN_THOUGHT + base64.b64encode(thought.encode()).decode()


def _checked(index: int, item: Any) -> Item:
    path = f"input[{index}]"
    if not isinstance(item, dict):
        raise WrongField(path, "must be an object")
    kind = item.get("type") or ("message" if "role" in item else None)
    strings: tuple[str, ...] = ()
    match kind:
        case "message":
            if item.get("role") not in ROLES:
                raise WrongField(f"{path}.role", f"must be one of {', '.join(ROLES)}")
            _check_parts(item.get("content"), f"{path}.content", images=item["role"] != "assistant")
        case "function_call":
            strings = ("call_id", "name", "arguments")
        case "custom_tool_call":
            strings = ("call_id", "name", "input")
        case "function_call_output" | "custom_tool_call_output":
            strings = ("call_id",)
            _check_parts(item.get("output"), f"{path}.output", images=True)
        case "item_reference":
            strings = ("id",)
        case "reasoning":
            pass
        case _:
            known = ", ".join((*PREFIXES, "item_reference"))
            raise WrongField(f"{path}.type", f"must be one of {known}, not {kind!r}")
    for name in (*strings, *(["id"] if item.get("id") else [])):
        if not isinstance(item.get(name), str):
            raise WrongField(f"{path}.{name}", "must be a string")
    return {**item, "type": kind, "id": item.get("id") or new_id(kind)}


def _check_parts(content: Any, path: str, *, images: bool) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise WrongField(path, "must be a string or a list of parts")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if images and kind == IMAGE:
            _check_image(part, f"{path}[{i}]")
            continue
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            known = ", ".join((*TEXT_PARTS, *([IMAGE] if images else [])))
            raise WrongField(f"{path}[{i}].type", f"must be one of {known}, not {kind!r}")
        if not isinstance(part.get(TEXT_PARTS[kind]), str):
            raise WrongField(f"{path}[{i}].{TEXT_PARTS[kind]}", "must be a string")


def _check_image(part: Item, path: str) -> None:
    if part.get("file_id") is not None:
        raise WrongField(f"{path}.file_id", "this server keeps no images; send `image_url`")
    if not isinstance(url := part.get("image_url"), str) or not (is_data(url) or is_address(url)):
        raise WrongField(f"{path}.image_url", NO_URL)
    if part.get("detail") not in DETAILS:
        raise WrongField(f"{path}.detail", f"must be {', '.join(filter(None, DETAILS))}")


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Return a chat message's content: text, or parts in their order where there are images."""
    if isinstance(content, str) or all(part["type"] != IMAGE for part in content):
        return _text(content)
    return [
        {"type": "image_url", "image_url": part["image_url"]}
        if part["type"] == IMAGE
        else {"type": "text", "text": part[TEXT_PARTS[part["type"]]]}
        for part in content
    ]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part[TEXT_PARTS[part["type"]]] for part in content)


def _thought(item: Item) -> str:
    if isinstance(parts := item.get("content"), list) and parts:
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    hidden = item.get("encrypted_content")
    if isinstance(hidden, str) and hidden.startswith(OPEN_THOUGHT):
        try:
            return base64.b64decode(hidden[len(OPEN_THOUGHT) :], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""
