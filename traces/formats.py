"""The trace formats, recognised by a file's first line.

| format | rows | arrival | lengths of prompt and output |
|---|---|---|---|
| splitserve | JSONL with a header | ``arrival_s`` | ``num_prompt_tokens``, ``num_output_tokens`` |
| mooncake | JSONL | ``timestamp``, milliseconds | ``input_length``, ``output_length`` |
| azure | CSV | ``TIMESTAMP``, date and time | ``ContextTokens``, ``GeneratedTokens`` |
| splitwise | CSV | ``arrival_timestamp``, seconds | ``prompt_size``, ``token_size`` |
| servegen | CSV | ``arrival_timestamp``, seconds | ``input_tokens``, ``output_tokens`` |

Block hashes: splitserve's, of blocks of any size; Mooncake's ``hash_ids``, of blocks of 512 tokens.

Each parser takes one row (the CSV columns by name, or the JSON object) and raises BadField.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from .request import TraceRequest

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


MOONCAKE_BLOCK_SIZE = 512
Parse = Callable[[Mapping[str, Any]], TraceRequest]


@dataclass(frozen=True, slots=True)
class Format:
    """``fields``: the columns or keys that every row has. ``origin_s``: how the first row dates the trace;
    else it starts at 0."""

    name: str
    kind: str  # csv or jsonl
    fields: tuple[str, ...]
    parse: Parse
    block_size: int | None = None
    origin_s: Callable[[Mapping[str, Any]], float] | None = None


def _azure_time(row: Mapping[str, Any]) -> float:
    """Unix seconds of a row's ``TIMESTAMP``; without an offset it is taken as UTC."""
    text = str(row["TIMESTAMP"])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadField(
            "TIMESTAMP", f"should be a time such as 2023-11-16 18:17:03.9799600, not {text!r:.60}"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _azure(row: Mapping[str, Any]) -> TraceRequest:
    num_prompt_tokens = number_of_tokens(row["ContextTokens"], "ContextTokens")
    return TraceRequest(
        _azure_time(row), num_prompt_tokens, number_of_tokens(row["GeneratedTokens"], "GeneratedTokens")
    )


def _columns(arrival: str, prompt: str, output: str) -> Parse:
    def parse(row: Mapping[str, Any]) -> TraceRequest:
        return TraceRequest(
            seconds(row[arrival], arrival),
            number_of_tokens(row[prompt], prompt),
            number_of_tokens(row[output], output),
        )

    return parse


_splitwise_sizes = _columns("arrival_timestamp", "prompt_size", "token_size")


def _splitwise(row: Mapping[str, Any]) -> TraceRequest:
    if row.get("batch_size", "1") not in ("1", "1.0"):
        raise BadField("batch_size", f"only requests of one sequence are read, not {row['batch_size']!r:.60}")
    return _splitwise_sizes(row)


def _mooncake(row: Mapping[str, Any]) -> TraceRequest:
    num_prompt_tokens = number_of_tokens(keyed(row, "input_length"), "input_length")
    hash_ids = keyed(row, "hash_ids")
    if not isinstance(hash_ids, list) or not all(type(one) is int and one >= 0 for one in hash_ids):
        raise BadField("hash_ids", f"should be a list of whole numbers, not {hash_ids!r:.60}")
    check_num_blocks(len(hash_ids), num_prompt_tokens, MOONCAKE_BLOCK_SIZE, "hash_ids")
    return TraceRequest(
        seconds(keyed(row, "timestamp"), "timestamp", 1e-3),
        num_prompt_tokens,
        number_of_tokens(keyed(row, "output_length"), "output_length"),
        tuple(hash_ids),
    )


def check_num_blocks(num_blocks: int, num_prompt_tokens: int, block_size: int, field: str) -> None:
    """Raise BadField if there are more hashes than blocks: the stated block size is wrong."""
    most = -(-num_prompt_tokens // block_size)
    if num_blocks > most:
        raise BadField(
            field,
            f"{num_blocks} hashes, but {num_prompt_tokens} tokens are at most {most} blocks of {block_size}",
        )


MOONCAKE = Format(
    "mooncake",
    "jsonl",
    ("timestamp", "input_length", "output_length", "hash_ids"),
    _mooncake,
    MOONCAKE_BLOCK_SIZE,
)
AZURE = Format(
    "azure", "csv", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure, origin_s=_azure_time
)
SPLITWISE = Format("splitwise", "csv", ("arrival_timestamp", "prompt_size", "token_size"), _splitwise)
SERVEGEN = Format(
    "servegen",
    "csv",
    ("arrival_timestamp", "input_tokens", "output_tokens"),
    _columns("arrival_timestamp", "input_tokens", "output_tokens"),
)
FORMATS = (MOONCAKE, AZURE, SPLITWISE, SERVEGEN)


def described() -> str:
    """All formats in one sentence, for errors."""
    foreign = "; ".join(
        f"{one.name} ({'columns' if one.kind == 'csv' else 'keys'} {', '.join(one.fields)})"
        for one in FORMATS
    )
    return f"known are: splitserve (a header line with its format); {foreign}"
