"""What /tokenize and /detokenize answer: on a thread for small bodies, in the readers' process for large ones."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from ..generate.bodies.fields import MAX_TOKENS, Body
from ..generate.bodies.tokens import DetokenizeRequest, TokenizeRequest
from ..generate.prompts import chat_prompt, encode
from ..http.errors import InvalidRequest, from_validation
from ..text.served_model import ServedModel

B = TypeVar("B", bound=Body)


def page_request(kind: type[B], body: bytes | bytearray) -> B:
    """Raises InvalidRequest."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from error


def tokenized(request: TokenizeRequest, model: ServedModel) -> bytes:
    """Raises ApiError."""
    model.check_name(request.model)
    tokenizer = model.tokenizer
    if (messages := request.messages) is not None:
        add = request.add_generation_prompt is not False
        ids = chat_prompt(messages, model, add_generation_prompt=add, most=MAX_TOKENS).token_ids
    else:
        special = request.add_special_tokens is not False
        (ids,) = encode([request.prompt or ""], model, add_special_tokens=special, most=MAX_TOKENS)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": None}
    if request.return_token_strs:
        answer["token_strs"] = [tokenizer.fast.id_to_token(token_id) for token_id in ids]
    return orjson.dumps(answer)


def detokenized(request: DetokenizeRequest, model: ServedModel) -> bytes:
    """Raises ApiError."""
    model.check_name(request.model)
    if request.tokens and (most := max(request.tokens)) >= model.vocab_size:
        message = f"tokens: token id {most} is outside the vocabulary of {model.vocab_size} tokens"
        raise InvalidRequest(message, param="tokens")
    return orjson.dumps({"prompt": model.tokenizer.decode(request.tokens)})
