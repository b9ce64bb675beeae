"""The base of all bodies: strictness, checks, and schemas of fields whose check is a function."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

MAX_TOKENS = 1 << 20
INT64 = 1 << 63
NULL: dict[str, Any] = {"type": "null"}
STRING: dict[str, Any] = {"type": "string", "minLength": 1}
MAX_SCALAR_CHARS = 32
UNKNOWN_EVERY_S = 10.0
MAX_UNKNOWN = 20
_log = logging.getLogger(__name__)
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    def unknown_fields(self) -> list[str]:
        """Return the paths of unknown fields that have a value, here and in all objects within."""
        extra = self.model_extra
        found = sorted(name for name in extra if extra[name] is not None) if extra else []
        for name in sorted(self.model_fields_set):
            value = getattr(self, name)
            if isinstance(value, str):  # as most fields of a chat's messages are
                continue
            if isinstance(value, Body):
                found += [f"{name}.{inner}" for inner in value.unknown_fields()]
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                found += [
                    f"{name}[{i}].{inner}" for i, each in enumerate(value) for inner in each.unknown_fields()
                ]
        return found


def invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid", "{message}", {"message": message})


def only(*allowed: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise invalid(f"must be {' or '.join(map(json.dumps, allowed))} on this server")
        return value

    return check


def scalar_of(value: Any) -> Any:
    """Return the number, true or false that a string holds; all else as given."""
    if not isinstance(value, str) or len(value) > MAX_SCALAR_CHARS:
        return value
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return found if isinstance(found, int | float) else value


def scalars(*names: str) -> Any:
    """Return a validator of fields whose numbers and truth values may come as strings, as in vLLM."""
    return field_validator(*names, mode="before")(scalar_of)


def schema(*kinds: dict[str, Any]) -> WithJsonSchema:
    """Return the JSON schema of a field whose check is a function."""
    return WithJsonSchema({"anyOf": [*kinds]})


class UnknownFields:
    """Log which fields of requests this server ignores: at most one line every ``UNKNOWN_EVERY_S``
    seconds."""

    def __init__(self) -> None:
        self._quiet_until = float("-inf")

    def note(self, names: Sequence[str]) -> None:
        """Log the names of one request's unknown fields, of which there are usually none."""
        if not names or (now := monotonic()) < self._quiet_until:
            return
        self._quiet_until = now + UNKNOWN_EVERY_S
        shown = ", ".join(ascii(name[:64]) for name in names[:MAX_UNKNOWN])
        _log.info("ignored unknown fields of a request: %s", shown)
