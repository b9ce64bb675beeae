"""The fields of chats and of /tokenize that decide how messages become a prompt."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from .fields import Body, invalid, scalars
from .tools import MAX_TOOLS, Tool

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
