"""The bodies and answers of /tokenize and /detokenize, on a thread for small bodies, in the reader process
for large ones."""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

import orjson
from pydantic import Field, model_validator

from ..errors import WrongField
from ..text.served_model import ServedModel
from .bodies.fields import INT64, MAX_TOKENS, Body, invalid
from .bodies.messages import MAX_MESSAGES, Message, TemplateFields
from .prompts import chat_prompt, encode


class TokenizeRequest(TemplateFields):
    """POST /tokenize: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt: give either `prompt` or `messages`")
        return self

    @property
    def has_images(self) -> bool:
        return any(message.images for message in self.messages or ())


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=INT64)]], Field(max_length=MAX_TOKENS)]


TextRequest = TypeVar("TextRequest", TokenizeRequest, DetokenizeRequest)


def tokenized(request: TokenizeRequest, model: ServedModel) -> bytes:
    """Raises ApiError."""
    tokenizer = model.tokenizer
    if (messages := request.messages) is not None:
        ids = chat_prompt(request, messages, request.tools or (), model, most=MAX_TOKENS).shown_ids
    else:
        special = request.add_special_tokens is not False
        (ids,) = encode([request.prompt or ""], model, add_special_tokens=special, most=MAX_TOKENS)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "tokens": [*ids],
        "token_strs": None,
    }
    if request.return_token_strs:
        answer["token_strs"] = [tokenizer.fast.id_to_token(token_id) for token_id in ids]
    return orjson.dumps(answer)


def detokenized(request: DetokenizeRequest, model: ServedModel) -> bytes:
    """Raises ApiError."""
    if request.tokens and (most := max(request.tokens)) >= model.vocab_size:
        raise WrongField("tokens", f"token id {most} is outside the vocabulary of {model.vocab_size} tokens")
    return orjson.dumps({"prompt": model.tokenizer.decode(request.tokens)})
