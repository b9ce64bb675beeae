"""The body of /v1/chat/completions, and the messages in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from .fields import INT64, NULL, Body, invalid, only, scalars, schema, unknown_within
from .sampling import SamplingFields
from .tools import (
    FUNCTION_CALL,
    MAX_TOOLS,
    TOOL_CHOICE,
    Function,
    Tool,
    ToolChoice,
    check_function_call,
    check_tool_choice,
)

MAX_MESSAGES = 10_000
FUNCTION_CALL_ID = "function0"
"""Id of a call in the form that OpenAI had before tools; as long as Mistral's templates require."""
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
    {
        "type": "object",
        "required": ["type", kind],
        "properties": {"type": {"const": kind}, kind: {"type": "string"}},
    }
    for kind in PARTS
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

    def for_template(self) -> dict[str, Any]:
        """Return the call with its arguments parsed: OpenAI's clients send them as text, templates write them
        as JSON."""
        try:
            arguments = json.loads(self.function.arguments)
        except ValueError:
            arguments = self.function.arguments
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class Message(Body):
    """One message of a chat."""

    role: str
    content: Annotated[Any, BeforeValidator(_content), CONTENT] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    """What calls were before ``tool_calls``; their results come in messages of role ``function``."""
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _known_role(self) -> Self:
        if self.role not in ("system", "developer", "user", "assistant", "tool", "function"):
            raise invalid(
                f"unknown role {self.role!r}; use system, developer, user, assistant, tool or function"
            )
        if self.content is None and self.role != "assistant":
            raise invalid(f"a message of role {self.role!r} needs `content`")
        return self

    def unknown_fields(self) -> list[str]:
        """See ``Body``."""
        found = super().unknown_fields()
        for i, call in enumerate(self.tool_calls or ()):
            found += unknown_within(f"tool_calls[{i}]", call)
        return found

    def for_template(self) -> dict[str, Any]:
        """Return the message as Hugging Face chat templates take it: older fields of OpenAI's become
        today's."""
        fields: dict[str, Any] = {
            "role": "tool" if self.role == "function" else self.role,
            "content": self.content or "",
        }
        if self.name is not None:
            fields["name"] = self.name
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template() for call in self.tool_calls]
        elif self.function_call is not None:
            fields["tool_calls"] = [ToolCall(id=FUNCTION_CALL_ID, function=self.function_call).for_template()]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        elif self.role == "function":
            fields["tool_call_id"] = FUNCTION_CALL_ID
        if self.reasoning_content is not None:
            fields["reasoning_content"] = self.reasoning_content
        return fields


def unknown_of_messages(messages: Sequence[Message]) -> list[str]:
    """Unknown fields of a body's ``messages``; mostly there are none, and this is asked for every request."""
    odd = [(i, message) for i, message in enumerate(messages) if message.model_extra or message.tool_calls]
    return [path for i, message in odd for path in unknown_within(f"messages[{i}]", message)]


def _no_template(value: Any) -> Any:
    if value is not None:
        raise invalid(
            "this server renders with the model's own template alone; leave it out, and pass "
            "variables in chat_template_kwargs"
        )
    return value


NoTemplate = Annotated[Any, AfterValidator(_no_template), WithJsonSchema(NULL)]


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template: NoTemplate = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, BeforeValidator(check_tool_choice), TOOL_CHOICE] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    function_call: Annotated[Any, BeforeValidator(check_function_call), FUNCTION_CALL] = None
    """OpenAI's fields before ``tools``; their answers report the one call in the old form, too."""
    modalities: Annotated[
        Any, AfterValidator(only(None, ["text"])), WithJsonSchema({"enum": [None, ["text"]]})
    ] = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    verbosity: Annotated[str, Field(max_length=32)] | None = None
    """Both are for the chat template, if it uses them."""

    _own_scalars = scalars("max_completion_tokens", "logprobs", "top_logprobs", "parallel_tool_calls")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("invalid", "top_logprobs: only allowed with `logprobs` true")
        if self.max_tokens == 0:
            raise PydanticCustomError("invalid", "max_tokens: must be at least 1")
        if self.functions is not None or self.function_call is not None:
            self._check_functions()
        return self if self.choice_of_tools is None and not self.all_tools else self._calls_are_possible()

    def unknown_fields(self) -> list[str]:
        """See ``Body``."""
        found = super().unknown_fields() + unknown_of_messages(self.messages)
        for i, tool in enumerate(self.tools or ()):
            found += unknown_within(f"tools[{i}]", tool)
        for i, function in enumerate(self.functions or ()):
            found += unknown_within(f"functions[{i}]", function)
        return found

    @property
    def max_new_tokens(self) -> int | None:
        """See ``SamplingFields``."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        """The template's variables beside messages and tools."""
        words = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {
            **{name: word for name, word in words.items() if word is not None},
            **(self.chat_template_kwargs or {}),
        }

    def _check_functions(self) -> None:
        if self.tools is not None or self.tool_choice is not None:
            raise invalid(
                "functions: not allowed beside `tools` and `tool_choice`, which came after "
                "`functions` and `function_call`"
            )
        if self.functions is None:
            raise invalid("function_call: needs `functions` to choose from")

    def _calls_are_possible(self) -> Self:
        choice, tools = self.choice_of_tools, self.all_tools
        if choice is not None and (choice.names is not None or choice.mode == "required"):
            field = "function_call" if self.functions else "tool_choice"
            if not tools:
                raise invalid("tool_choice: needs `tools` to choose from")
            if unknown := sorted((choice.names or frozenset()) - {tool.function.name for tool in tools}):
                raise invalid(
                    f"{field}: there is no function {', '.join(map(repr, unknown))} in "
                    f"`{self.field_of_tools}`"
                )
        if self.holds_calls and (self.ignore_eos or self.min_tokens):
            why = "a tool call must be made" if self.must_call else "tool calls are held to a form"
            raise invalid(f"{'ignore_eos' if self.ignore_eos else 'min_tokens'}: not allowed where {why}")
        return self

    @property
    def field_of_tools(self) -> str:
        """The name of the body's field of tools."""
        return "tools" if self.functions is None else "functions"

    @property
    def all_tools(self) -> list[Tool] | None:
        """All tools, from ``tools`` or ``functions``."""
        if self.functions is None:
            return self.tools
        return [Tool(type="function", function=function) for function in self.functions]

    @property
    def choice_of_tools(self) -> ToolChoice | None:
        """The choice, from ``tool_choice`` or ``function_call``."""
        choice: ToolChoice | None = self.tool_choice if self.functions is None else self.function_call
        return choice

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the template shows to the model."""
        choice = self.choice_of_tools
        return [] if choice is not None and choice.mode == "none" else self.all_tools or []

    @property
    def callable_tools(self) -> list[Tool]:
        """The offered tools that may be called."""
        choice = self.choice_of_tools
        names = choice.names if choice is not None else None
        return [tool for tool in self.offered_tools if names is None or tool.function.name in names]

    @property
    def has_grammar(self) -> bool:
        """See ``SamplingFields``."""
        return self.output_format is not None or self.holds_calls

    @property
    def must_call(self) -> bool:
        """Whether a call is required."""
        return (choice := self.choice_of_tools) is not None and choice.mode == "required"

    @property
    def one_call(self) -> bool:
        """Whether an answer has at most one call."""
        choice = self.choice_of_tools
        older = self.functions is not None
        return older or self.parallel_tool_calls is False or (choice is not None and choice.one)

    @property
    def holds_calls(self) -> bool:
        """Whether a grammar binds the calls: one is required, some tools are excluded, or one is strict."""
        if not self.offered_tools:
            return False
        limited = (choice := self.choice_of_tools) is not None and choice.names is not None
        return self.must_call or limited or any(tool.function.strict for tool in self.callable_tools)
