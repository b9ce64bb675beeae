"""What the bodies of several endpoints have in common: strictness, checks, and schemas of fields whose check is a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_TOKENS = 1 << 20
INT64 = 1 << 63
NULL: dict[str, Any] = {"type": "null"}
STRING: dict[str, Any] = {"type": "string", "minLength": 1}


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    def unknown_fields(self) -> list[str]:
        """Paths of fields that have a value and that this server does not know."""
        return sorted(name for name, value in self.model_extra.items() if value is not None) if self.model_extra else []


def unknown_within(path: str, inner: Body) -> list[str]:
    """Unknown fields of what a field holds, with its path before theirs."""
    return [f"{path}.{name}" for name in inner.unknown_fields()]


def invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid", "{message}", {"message": message})


def only(*allowed: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise invalid(f"must be {' or '.join(map(json.dumps, allowed))} on this server")
        return value

    return check


def schema(*kinds: dict[str, Any]) -> WithJsonSchema:
    """What a field takes whose check is a function."""
    return WithJsonSchema({"anyOf": [*kinds]})
