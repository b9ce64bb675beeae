"""One field of a row, checked. What is wrong is raised as BadField; the reader adds file and line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

MAX_TOKENS = 1 << 30  # no context is that long: catches columns that were mixed up
MAX_ARRIVAL_S = 1e11  # 3,000 years


class BadField(Exception):
    """``field`` is the column or key; the message states what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def number_of_tokens(value: object, field: str) -> int:
    """A whole number of tokens, 0 to 2**30, from JSON or from text (``128``, also ``128.0``)."""
    if isinstance(value, str):
        value = int(value) if value.isdecimal() else _float(value, field)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        _refuse(field, value, "should be a whole number of tokens")
    return value


def seconds(value: object, field: str, unit_s: float = 1.0) -> float:
    """A time of at least 0, given in units of ``unit_s`` seconds."""
    number = _float(value, field) if isinstance(value, str) else value
    if (
        not isinstance(number, (int, float))
        or isinstance(number, bool)
        or not 0 <= number * unit_s <= MAX_ARRIVAL_S
    ):
        _refuse(field, value, "should be a time of at least 0")
    return number * unit_s


def keyed(row: Mapping[str, Any], field: str) -> Any:
    """``row[field]``, or BadField."""
    if field not in row:
        raise BadField(field, f"is missing; the row has: {', '.join(map(str, row)) or 'nothing'}")
    return row[field]


def _float(text: str, field: str) -> float:
    try:
        number = float(text)
    except ValueError:
        _refuse(field, text, "should be a number")
    if not math.isfinite(number):
        _refuse(field, text, "should be a finite number")
    return number


def _refuse(field: str, value: object, rule: str) -> NoReturn:
    raise BadField(field, f"{rule}, not {value!r:.60}")
