"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from .chat import MAX_MESSAGES, Message, NoTemplate, unknown_of_messages
from .fields import INT64, MAX_TOKENS, Body


class TokenizeRequest(Body):
    """POST /tokenize: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    chat_template: NoTemplate = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("invalid", "prompt: give either `prompt` or `messages`")
        return self

    def unknown_fields(self) -> list[str]:
        """See ``Body``."""
        return super().unknown_fields() + unknown_of_messages(self.messages or ())


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=INT64)]], Field(max_length=MAX_TOKENS)]
