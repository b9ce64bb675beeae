"""The body of /v1/responses, OpenAI's API after chat completions, and the chat completion it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ...transport.messages.fields import MAX_TEMPERATURE
from ..generate.bodies.fields import INT64, STRING, Body, Metadata, invalid, schema
from ..generate.bodies.messages import MAX_MESSAGES
from ..generate.bodies.sampling import ServiceTier
from ..generate.bodies.tools import MAX_TOOLS
from .responses_items import Item, messages_of
from .responses_tools import OFFERED, chat_choice, chat_tool, check_tools, offered, unknown_of_tools

LOGPROBS, THOUGHTS = "message.output_text.logprobs", "reasoning.encrypted_content"
CHAT_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Names here of a chat's fields, for its errors."""
NOT_HERE = (
    *("conversation", "prompt", "context_management", "moderation", "access_programs", "image"),
    "personality",
)
IGNORED = {
    "prompt_cache_retention": "how long a cache keeps the prompt",
    "prompt_cache_options": "how a cache keeps the prompt",
}
"""By name: what it is about, which is why it cannot change an answer."""


def _input(value: Any) -> Any:
    if not isinstance(value, str | list) or not value:
        raise invalid("must be a text or a list of items, and not be empty")
    if len(value) > MAX_MESSAGES and isinstance(value, list):
        raise invalid(f"has {len(value)} items; at most {MAX_MESSAGES} are allowed")
    return value


Input = Annotated[
    Any,
    BeforeValidator(_input),
    schema({**STRING}, {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES}),
]


class Reasoning(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Taken, and never written: the whole thought is in the answer."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """Taken, and without effect: the chat template decides which earlier thoughts the model sees."""
    mode: Literal["standard"] | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid("schema: must be given with `type` json_schema")
        return self

    def for_chat(self) -> dict[str, Any]:
        """Return the chat's ``response_format``."""
        if self.type != "json_schema":
            return {"type": self.type}
        inner = {"name": self.name or "output", "schema": self.json_schema, "strict": self.strict}
        return {"type": self.type, "json_schema": inner}


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[str, Field(max_length=32)] | None = None


class StreamOptions(Body):
    include_obfuscation: bool | None = None


class CountInputRequest(Body):
    """POST /v1/responses/input_tokens."""

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=64)] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @model_validator(mode="after")
    def _known_tools(self) -> CountInputRequest:
        check_tools(self.tools or ())
        if not self.functions and self.tool_choice not in (None, "auto", "none"):
            raise invalid("tool_choice: needs a tool in `tools` that the client runs")
        for name in NOT_HERE:
            if (self.model_extra or {}).get(name) is not None:
                raise invalid(f"{name}: is not built on this server; leave it out")
        return self

    def unknown_fields(self) -> list[str]:
        found = [name for name in super().unknown_fields() if name not in IGNORED]
        return found + unknown_of_tools(self.tools or ())

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that the model is offered."""
        return offered(self.tools or ())

    def for_chat(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the body of the chat completion. ``items``: the whole conversation."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        text, effort = self.text or TextOptions(), self.reasoning.effort if self.reasoning else None
        chat: dict[str, Any] = {
            "model": self.model,
            "messages": [*messages, *messages_of(items)],
            "reasoning_effort": effort,
            "verbosity": text.verbosity,
            "response_format": text.format.for_chat() if text.format else None,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        if effort == "none":
            chat["chat_template_kwargs"] = {"enable_thinking": False}
        if functions := self.functions:
            chat["tools"] = [chat_tool(tool) for tool in functions]
            chat["tool_choice"] = chat_choice(self.tool_choice)
        return chat


class ResponsesRequest(CountInputRequest):
    """POST /v1/responses."""

    input: Input
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: Annotated[list[str], Field(max_length=32)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    """Has no effect: it bounds calls of tools that the server runs, and this one runs none."""
    metadata: Metadata | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    service_tier: ServiceTier | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="after")
    def _background_is_stored(self) -> ResponsesRequest:
        if self.background and self.store is False:
            raise invalid("background: needs `store` true, for the answer is fetched later")
        return self

    @property
    def shows_thoughts(self) -> bool:
        """Whether thoughts are also wanted in the form that clients without a store return."""
        return THOUGHTS in (self.include or ())

    def for_chat(self, items: Sequence[Item]) -> dict[str, Any]:
        chat = super().for_chat(items)
        chat |= {
            "max_completion_tokens": self.max_output_tokens, "temperature": self.temperature,
            "top_p": self.top_p, "prompt_cache_key": self.prompt_cache_key, "service_tier": self.service_tier,
            "user": self.user, "metadata": self.metadata,
        }  # fmt: skip
        if self.top_logprobs is not None or LOGPROBS in (self.include or ()):
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return {name: value for name, value in chat.items() if value is not None}

    def echo(self) -> dict[str, Any]:
        """Return the fields that the answer repeats."""
        reasoning, text = self.reasoning or Reasoning(), self.text or TextOptions()
        format_ = (
            text.format.model_dump(by_alias=True, exclude_none=True) if text.format else {"type": "text"}
        )
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": self.service_tier or "default",
            "store": self.store is not False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": format_, "verbosity": text.verbosity or "medium"},
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool for tool in self.tools or () if tool["type"] in OFFERED],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
