"""Validation of JSON bodies, with pydantic's errors as sentences: what must be given, and what was."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .errors import InvalidRequest

MAX_REPORTED = 3
MAX_SHOWN_CHARS = 40
OBJECT, WHOLE = "must be a JSON object", "must be a whole number"
NUMBER, BOOLEAN = "must be a number", "must be true or false"
RULES = {
    "missing": "must be given",
    "extra_forbidden": "is not a field of this request",
    "model_type": OBJECT,
    "dict_type": OBJECT,
    "list_type": "must be a list",
    "string_type": "must be a string",
    "bool_type": BOOLEAN,
    "int_type": WHOLE,
    "int_from_float": WHOLE,
    "int_parsing_size": WHOLE,
    "float_type": NUMBER,
    "finite_number": NUMBER,
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "string_unicode": "must be text in UTF-8",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be {expected}",
}
"""By pydantic's type of error, with the names of its context. Other types are checks of ours, which have
their own sentence."""
SAYS_NOTHING_OF_ITS_VALUE = (
    "missing",
    "extra_forbidden",
    "string_too_short",
    "string_too_long",
    "too_short",
    "too_long",
)
M = TypeVar("M", bound=BaseModel)
LONE = "a surrogate without the other half of its pair (write both, or the character in UTF-8)"
JSON_FAULTS = {
    "EOF while parsing a value at line 1 column 0": "it is empty",
    "EOF while parsing": "it ends within",
    "unexpected end of hex escape": LONE,
    "lone leading surrogate in hex escape": LONE,
    "invalid unicode code point": "bytes that are not UTF-8",
}
MAX_BEFORE = 1 << 16  # bytes before a fault in which its field's name is looked for


def validated(kind: type[M], body: bytes | bytearray) -> M:
    """Return a body as ``kind``. Raises InvalidRequest."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from error


def from_validation(error: ValidationError) -> InvalidRequest:
    """One sentence for the first MAX_REPORTED fields that are wrong, each with its path."""
    found = error.errors(include_url=False)
    if found[0]["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {_json_fault(found[0])}.", code="invalid_json")
    if found[0]["type"] == "model_type" and not found[0]["loc"]:
        return InvalidRequest("The body must be a JSON object.")
    message = "; ".join(_sentence(detail) for detail in found[:MAX_REPORTED])
    if len(found) > MAX_REPORTED:
        message += f"; and {len(found) - MAX_REPORTED} more"
    return InvalidRequest(message, param=field_path(found[0]["loc"]) or _named_field(found[0]["msg"]))


def field_path(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _json_fault(detail: ErrorDetails) -> str:
    """With the name before it on its line, which is that of its field."""
    message = detail["msg"].removeprefix("Invalid JSON: ")
    line, column = map(int, re.findall(r"line (\d+) column (\d+)$", message)[0])
    before = bytes(detail["input"]).split(b"\n")[line - 1]
    names = re.findall(rb'"([^"\\]+)"\s*:', before[max(0, column - MAX_BEFORE) : column])
    for fault, text in JSON_FAULTS.items():
        message = message.replace(fault, text)
    return f"{message}, near {names[-1].decode(errors='replace')!r}" if names else message


def _named_field(message: str) -> str | None:
    """Return the field that begins a sentence about several fields."""
    found = re.match(r"(\w+): ", message)
    return found[1] if found else None


def _sentence(detail: ErrorDetails) -> str:
    path, kind = field_path(detail["loc"]), detail["type"]
    text = detail["msg"].removeprefix("Value error, ")
    if kind in RULES:
        text = RULES[kind].format(**{name: _plain(bound) for name, bound in detail.get("ctx", {}).items()})
        if kind not in SAYS_NOTHING_OF_ITS_VALUE:
            text += _given(detail["input"])
    return f"{path}: {text}" if path else text


def _plain(bound: Any) -> Any:
    """2, not 2.0."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _given(value: Any) -> str:
    """What the client sent instead; nothing where that is long."""
    if not isinstance(value, str | int | float | None):
        return ""
    if isinstance(value, int) and value.bit_length() > 4 * MAX_SHOWN_CHARS:
        return ""  # Python writes no integer of thousands of digits
    shown = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
    return f", not {shown}" if len(shown) <= MAX_SHOWN_CHARS else ""
