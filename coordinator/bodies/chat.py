"""The body of /v1/chat/completions, and the messages in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ..chat_output.tool_choice import MAX_TOOLS, TOOL_CHOICE, Tool, check_tool_choice
from .fields import INT64, NULL, Body, invalid, only, schema, unknown_within
from .sampling import SamplingFields

MAX_MESSAGES = 10_000
PARTS = ("text", "refusal")
"""Kinds of parts of a content: what an assistant refused earlier in words is text to the template, too."""


def _content(value: Any) -> str | None:
    """Text, or the texts of a list of text parts, one a line."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("must be a string or a list of text parts")
    return "\n".join(_part(i, part) for i, part in enumerate(value))


def _part(index: int, part: Any) -> str:
    if not isinstance(part, dict):
        raise invalid(f'part {index} must be an object such as {{"type": "text", "text": "..."}}')
    if (kind := part.get("type")) not in PARTS:
        raise invalid(f"part {index} has type {kind!r}; this model takes only text parts")
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid(f"part {index} needs a string `{kind}`")
    return text


_PARTS: list[dict[str, Any]] = [
    {"type": "object", "required": ["type", kind], "properties": {"type": {"const": kind}, kind: {"type": "string"}}} for kind in PARTS
]
CONTENT = schema({"type": "string"}, {"type": "array", "items": {"anyOf": _PARTS}}, NULL)


class CalledFunction(Body):
    name: str
    arguments: str = "{}"


class ToolCall(Body):
    """A call that the model made earlier in the chat."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction

    def unknown_fields(self) -> list[str]:
        """See ``Body``."""
        return super().unknown_fields() + unknown_within("function", self.function)


class Message(Body):
    """One message of a chat."""

    role: str
    content: Annotated[Any, BeforeValidator(_content), CONTENT] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _known_role(self) -> Self:
        if self.role not in ("system", "developer", "user", "assistant", "tool", "function"):
            raise invalid(f"unknown role {self.role!r}; use system, developer, user, assistant or tool")
        if self.content is None and self.role != "assistant":
            raise invalid(f"a message of role {self.role!r} needs `content`")
        return self

    def unknown_fields(self) -> list[str]:
        """See ``Body``."""
        found = super().unknown_fields()
        for i, call in enumerate(self.tool_calls or ()):
            found += unknown_within(f"tool_calls[{i}]", call)
        return found


def unknown_of_messages(messages: Sequence[Message]) -> list[str]:
    """Unknown fields of a body's ``messages``; mostly there are none, and this is asked for every request."""
    odd = [(i, message) for i, message in enumerate(messages) if message.model_extra or message.tool_calls]
    return [path for i, message in odd for path in unknown_within(f"messages[{i}]", message)]


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, BeforeValidator(check_tool_choice), TOOL_CHOICE] = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[Any, AfterValidator(only(None, ["text"])), WithJsonSchema({"enum": [None, ["text"]]})] = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    verbosity: Annotated[str, Field(max_length=32)] | None = None
    """Both are for the chat template, if it knows of them."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("invalid", "top_logprobs: only allowed with `logprobs` true")
        if self.max_tokens == 0:
            raise PydanticCustomError("invalid", "max_tokens: must be at least 1")
        return self if self.tool_choice is None and not self.tools else self._calls_are_possible()

    def unknown_fields(self) -> list[str]:
        """See ``Body``."""
        found = super().unknown_fields() + unknown_of_messages(self.messages)
        for i, tool in enumerate(self.tools or ()):
            found += unknown_within(f"tools[{i}]", tool)
        return found

    @property
    def max_new_tokens(self) -> int | None:
        """See ``SamplingFields``."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        """Beside messages and tools."""
        words = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {**{name: word for name, word in words.items() if word is not None}, **(self.chat_template_kwargs or {})}

    def _calls_are_possible(self) -> Self:
        choice = self.tool_choice
        if choice is not None and (choice.names is not None or choice.mode == "required"):
            if not self.tools:
                raise invalid("tool_choice: needs `tools` to choose from")
            if unknown := sorted((choice.names or frozenset()) - {tool.function.name for tool in self.tools}):
                raise invalid(f"tool_choice: there is no function {', '.join(map(repr, unknown))} in `tools`")
        if self.holds_calls and (self.ignore_eos or self.min_tokens):
            why = "a tool call must be made" if self.must_call else "tool calls are held to a form"
            raise invalid(f"{'ignore_eos' if self.ignore_eos else 'min_tokens'}: not allowed where {why}")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """What the model is told of."""
        return [] if not self.tools or (self.tool_choice is not None and self.tool_choice.mode == "none") else self.tools

    @property
    def callable_tools(self) -> list[Tool]:
        """Those of them that it may call."""
        names = self.tool_choice.names if self.tool_choice is not None else None
        return self.offered_tools if names is None else [tool for tool in self.offered_tools if tool.function.name in names]

    @property
    def must_call(self) -> bool:
        """Rather than as the model likes."""
        return self.tool_choice is not None and self.tool_choice.mode == "required"

    @property
    def one_call(self) -> bool:
        """At most, in an answer."""
        return self.parallel_tool_calls is False or (self.tool_choice is not None and self.tool_choice.one)

    @property
    def holds_calls(self) -> bool:
        """Whether a grammar sees to the calls: one must be made, not all tools may be called, or one of them is strict."""
        if not self.offered_tools:
            return False
        limited = self.tool_choice is not None and self.tool_choice.names is not None
        return self.must_call or limited or any(tool.function.strict for tool in self.callable_tools)
