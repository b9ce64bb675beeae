"""The messages of a chat, and how a chat template takes them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from ...text.chat_template import Arguments
from .content import CONTENT, Content, ImagePart, content_of
from .fields import Body, invalid, scalars
from .tools import MAX_TOOLS, Tool

MAX_MESSAGES = 10_000
FUNCTION_CALL_ID = "function0"
"""Id of a call in the form that OpenAI had before tools; as long as Mistral's templates require."""


class CalledFunction(Body):
    name: str
    arguments: str = "{}"


class ToolCall(Body):
    """A call that the model made earlier in the chat."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call with its arguments parsed: OpenAI's clients send them as text, templates write them
        as JSON."""
        text = self.function.arguments
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = text
        if isinstance(arguments, dict):
            arguments = Arguments(arguments, text)
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class Message(Body):
    """One message of a chat."""

    role: str
    content: Annotated[Any, BeforeValidator(content_of), CONTENT] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    """What calls were before ``tool_calls``; their results come in messages of role ``function``."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by its other name."""
    refusal: str | None = None
    """What the assistant refused earlier in words, which is its text to the template."""
    audio: None = None

    @model_validator(mode="after")
    def _known_role(self) -> Self:
        if self.role not in ("system", "developer", "user", "assistant", "tool", "function"):
            raise invalid(
                f"unknown role {self.role!r}; use system, developer, user, assistant, tool or function"
            )
        if self.content is None and self.role != "assistant":
            raise invalid(f"a message of role {self.role!r} needs `content`")
        return self

    @property
    def text(self) -> str:
        """The content's text."""
        content: Content = self.content or ""
        if isinstance(content, str):
            return content
        return "\n".join(part for part in content if isinstance(part, str))

    @property
    def images(self) -> list[ImagePart]:
        """The content's images."""
        content: Content = self.content or ""
        return [] if isinstance(content, str) else [each for each in content if isinstance(each, ImagePart)]

    def for_template(self) -> dict[str, Any]:
        """Return the message as Hugging Face chat templates take it: older fields of OpenAI's become
        today's."""
        content: Content = self.content or self.refusal or ""
        fields: dict[str, Any] = {
            "role": "tool" if self.role == "function" else self.role,
            "content": content if isinstance(content, str) else [*map(_for_template, content)],
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
        if (thought := self.reasoning_content or self.reasoning) is not None:
            fields["reasoning_content"] = thought
        return fields


def _for_template(part: str | ImagePart) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


MAX_TEMPLATE_CHARS = 1 << 18


class TemplateFields(Body):
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The answer goes on with the last message, the assistant's, which is left open."""
    add_special_tokens: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    """Instead of the model's; only where the server trusts those of requests."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    verbosity: Annotated[str, Field(max_length=32)] | None = None
    """Like all variables of the template for those that use it."""

    _template_scalars = scalars("add_generation_prompt", "continue_final_message", "add_special_tokens")

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message: not allowed with `add_generation_prompt` true, which begins a new "
                "message"
            )
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """The template's variables beside messages and tools."""
        names = ("documents", "reasoning_effort", "verbosity")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**given, **(self.chat_template_kwargs or {})}
