"""The body of /v1/messages, Anthropic's API, and the chat completion it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from ..errors import WrongField
from ..generate.bodies.content import BASE64, is_address
from ..generate.bodies.fields import INT64, Body, invalid, schema
from ..generate.bodies.messages import MAX_MESSAGES
from ..generate.bodies.tools import MAX_TOOLS

MAX_STOP_SEQUENCES = 64
NEEDED: dict[str, dict[str, type]] = {
    "text": {"text": str},
    "image": {"source": dict},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
}
"""The fields that a block of each kind must have, with their types."""
OF_ROLE = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}


class Block(NamedTuple):
    """One block of a message's content."""

    kind: str
    fields: dict[str, Any]


def _blocks(value: Any) -> list[Block]:
    """Return a content's blocks: text alone is one block of text."""
    if isinstance(value, str):
        return [Block("text", {"text": value})] if value else []
    if not isinstance(value, list):
        raise invalid("must be a string or a list of content blocks")
    return [_block(i, block) for i, block in enumerate(value)]


def _block(index: int, block: Any) -> Block:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in NEEDED:
        raise invalid(
            f"block {index} has type {kind!r}; this server takes {', '.join(NEEDED)} (no documents or "
            "tools that a server runs)"
        )
    for name, type_ in NEEDED[kind].items():
        if not isinstance(block.get(name), type_):
            raise invalid(f"block {index} of type {kind!r} needs a {type_.__name__} `{name}`")
    if kind == "image":
        _check_image(f"block {index}", block)
    return Block(kind, block)


def _check_image(name: str, block: dict[str, Any]) -> None:
    source, changes = block["source"], block.get("transformations") or {}
    if not _is_image(source):
        raise invalid(f"{name}: source {SOURCE}")
    if changes not in ({}, {"oversized_image": "downsize"}):
        raise invalid(f"{name}: transformations: an image that is too large is made smaller, nothing else")


SOURCE = "must be of type 'base64' with `data` and `media_type` ('image/png'), or of type 'url' with `url`"


def _is_image(source: dict[str, Any]) -> bool:
    if source.get("type") == "url":
        return isinstance(url := source.get("url"), str) and is_address(url)
    kind, data = source.get("media_type"), source.get("data")
    named = isinstance(kind, str) and re.fullmatch(r"image/[\w.+-]{1,64}", kind) is not None
    return source.get("type") == "base64" and named and isinstance(data, str)


CONTENT = schema(
    {"type": "string"},
    {
        "type": "array",
        "items": {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(NEEDED)}}},
    },
)
Blocks = Annotated[list[Block], BeforeValidator(_blocks), CONTENT]


class AnthropicMessage(Body):
    """One message of the conversation. Marks for caching are ignored: prefixes are cached without them."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def for_chat(self) -> Iterator[dict[str, Any]]:
        """Yield the chat messages it stands for: each tool's result is one of its own. Raises ValueError."""
        allowed = OF_ROLE[self.role]
        for block in self.content:
            if block.kind not in allowed:
                raise ValueError(f"a message of role {self.role!r} has no block of type {block.kind!r}")
        for block in self.content:
            if block.kind == "tool_result":
                yield _tool_message(block.fields)
        content = _content(self.content)
        calls = [_call(block.fields) for block in self.content if block.kind == "tool_use"]
        thought = "".join(block.fields["thinking"] for block in self.content if block.kind == "thinking")
        if content or calls or self.role == "assistant" or not self.content:
            message: dict[str, Any] = {"role": self.role, "content": content}
            if calls:
                message["tool_calls"] = calls
            if thought:
                message["reasoning_content"] = thought
            yield message


class CustomTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the chat's function."""
        function = {"name": self.name, "parameters": self.input_schema}
        more = {"description": self.description, "strict": self.strict}
        return {"type": "function", "function": {**function, **_given(more)}}


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> Any:
        """Return the chat's ``tool_choice``."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    """Not bounded here: a thought ends where the model ends it."""


class JsonOutput(Body):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    format: JsonOutput | None = None
    effort: Annotated[str, Field(max_length=32)] | None = None


class Metadata(Body):
    user_id: Annotated[str, Field(max_length=512)] | None = None


IGNORED = {
    "cache_control": "what a cache keeps: prefixes are cached without it",
    "diagnostics": "what more is reported",
    "inference_geo": "where it runs",
    "speed": "how fast it runs",
    "user_profile_id": "names of the client's users",
    "workspace_id": "names of the client's users",
    "display": "how much of a thought is given back: all of it",
    "defer_loading": "tools that are shown later: all are shown at once",
    "eager_input_streaming": "when a call's input is sent",
}
"""By name, at any depth: what it is about, which is why it cannot change an answer."""


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def unknown_fields(self) -> list[str]:
        return [path for path in super().unknown_fields() if path.rpartition(".")[2] not in IGNORED]

    def for_chat(self) -> dict[str, Any]:
        """Return the body of the chat completion. Raises InvalidRequest."""
        system = "\n".join(block.fields.get("text", "") for block in self.system or ())
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for i, message in enumerate(self.messages):
            try:
                messages += message.for_chat()
            except ValueError as error:
                path = f"messages[{i}].content"
                raise WrongField(path, error) from error
        chat: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.messages[-1].role == "assistant":  # the answer begins with it
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            chat["tools"] = [tool.for_chat() for tool in self.tools]
        if (choice := self.tool_choice) is not None:
            chat["tool_choice"] = choice.for_chat()
            chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None:
            chat["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        if (output := self.output_config) is not None:
            chat["reasoning_effort"] = output.effort
            if output.format is not None:
                schema = {"name": "output", "schema": output.format.json_schema}
                chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return chat


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=INT64)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_chat(self) -> dict[str, Any]:
        tier = {"auto": "auto", "standard_only": "default", None: None}[self.service_tier]
        more = {
            "max_completion_tokens": self.max_tokens, "stop": self.stop_sequences, "service_tier": tier,
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k,
            "user": self.metadata.user_id if self.metadata is not None else None,
        }  # fmt: skip
        return {**super().for_chat(), **_given(more)}


def _tool_message(fields: dict[str, Any]) -> dict[str, Any]:
    blocks = _blocks(fields.get("content") or "")
    if other := next((block.kind for block in blocks if block.kind not in SHOWN), None):
        raise ValueError(f"the result of a tool is text and images on this server, not {other!r}")
    if fields.get("is_error"):  # chat templates have no other place for it
        first = blocks[0].fields["text"] if blocks and blocks[0].kind == "text" else None
        blocks = [Block("text", {"text": f"Error: {first or ''}"}), *blocks[first is not None :]]
    return {"role": "tool", "tool_call_id": fields["tool_use_id"], "content": _content(blocks)}


SHOWN = ("text", "image")
"""Blocks that are parts of a chat message's content."""


def _content(blocks: Sequence[Block]) -> str | list[dict[str, Any]]:
    """Return a chat message's content: text, or parts in their order where there are images."""
    blocks = [block for block in blocks if block.kind in SHOWN]
    if all(block.kind == "text" for block in blocks):
        return "\n".join(block.fields["text"] for block in blocks)
    return [_part(block) for block in blocks]


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.fields["text"]}
    source = block.fields["source"]
    is_url = source["type"] == "url"
    url = source["url"] if is_url else f"data:{source['media_type']}{BASE64}{source['data']}"
    return {"type": "image_url", "image_url": url}


def _call(fields: dict[str, Any]) -> dict[str, Any]:
    function = {"name": fields["name"], "arguments": json.dumps(fields["input"], ensure_ascii=False)}
    return {"id": fields["id"], "type": "function", "function": function}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
