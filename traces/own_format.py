"""Our own trace format: JSON lines, a header and then one request a line. A coordinator's request log is
written in it.

    {"format": "splitserve-trace", "version": 1, "block_size": 16, "origin_s": 1763700000.0,
     "disorder_s": 600}
    {"arrival_s": 0.0, "num_prompt_tokens": 70, "num_output_tokens": 12,
     "block_hashes": ["9f3c", "03aa"], "session": "s17"}

Header: ``format`` and ``version`` are needed. ``block_size`` is needed where rows have ``block_hashes``.
``origin_s`` is the Unix time at arrival 0. ``disorder_s``: rows may be in the order in which requests
*ended*, each at most this many seconds of arrival time too late (a log's request timeout). Readers sort them.

Rows: arrival and the two lengths are needed. ``block_hashes`` are 1 to 32 hexadecimal digits each, chained
from the prompt's start (an equal hash means equal tokens up to there). ``session`` is any opaque text of at
most 128 characters. ``token_times_s``: when each output token came, in seconds after the arrival; readers
here skip it. Anything else is an error, and so is another version: a reader never guesses.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import hexdigits
from typing import Any, BinaryIO, cast

import orjson

from .errors import TraceFileError
from .formats import BadField, check_num_blocks, keyed, number_of_tokens, seconds
from .request import Trace, TraceRequest

FORMAT_NAME = "splitserve-trace"
VERSION = 1
HEADER_KEYS = ("format", "version", "block_size", "origin_s", "disorder_s")
ROW_KEYS = {"arrival_s", "num_prompt_tokens", "num_output_tokens", "block_hashes", "session", "token_times_s"}
MAX_HASH_DIGITS = 32
MAX_SESSION_CHARACTERS = 128
MAX_BLOCK_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class Header:
    """The first line."""

    block_size: int | None = None
    origin_s: float = 0.0
    disorder_s: float = 0.0


def parse_header(row: Mapping[str, Any]) -> Header:
    """Raises BadField."""
    _no_unknown(row, HEADER_KEYS)
    if row.get("version") != VERSION:
        raise BadField(
            "version",
            (
                f"this is version {row.get('version')!r:.20} of the format, and only version {VERSION} "
                "is known here"
            ),
        )
    block_size = row.get("block_size")
    if block_size is not None and not (type(block_size) is int and 1 <= block_size <= MAX_BLOCK_SIZE):
        raise BadField(
            "block_size", f"should be a number of tokens from 1 to {MAX_BLOCK_SIZE}, not {block_size!r:.60}"
        )
    return Header(
        block_size,
        seconds(row.get("origin_s", 0.0), "origin_s"),
        seconds(row.get("disorder_s", 0.0), "disorder_s"),
    )


def parse_row(row: Mapping[str, Any], block_size: int | None) -> TraceRequest:
    """Raises BadField."""
    if not ROW_KEYS.issuperset(row):
        _no_unknown(row, sorted(ROW_KEYS))
    num_prompt_tokens = number_of_tokens(keyed(row, "num_prompt_tokens"), "num_prompt_tokens")
    session = row.get("session", "")
    if not isinstance(session, str) or len(session) > MAX_SESSION_CHARACTERS:
        raise BadField(
            "session", f"should be text of at most {MAX_SESSION_CHARACTERS} characters, not {session!r:.60}"
        )
    return TraceRequest(
        seconds(keyed(row, "arrival_s"), "arrival_s"),
        num_prompt_tokens,
        number_of_tokens(keyed(row, "num_output_tokens"), "num_output_tokens"),
        _hashes(row["block_hashes"], num_prompt_tokens, block_size) if "block_hashes" in row else (),
        session,
    )


def write_trace(path: Path, trace: Trace) -> int:
    """Writes a trace (gzip'ed if the name ends in ``.gz``) and returns its number of requests; the same trace
    gives the same bytes.

    The file appears only when it is whole, or is written in its place where it is a link or a device, which
    a new file would replace. Raises TraceError.
    """
    in_place = path.is_symlink() or (path.exists() and not path.is_file())
    part = path if in_place else path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
                    count = _write(
                        cast(BinaryIO, packed), header_line(trace.block_size, trace.origin_s), trace
                    )
            else:
                count = _write(file, header_line(trace.block_size, trace.origin_s), trace)
        os.replace(part, path)
    except OSError as error:
        raise TraceFileError(path, f"cannot be written: {error.strerror or error}") from None
    finally:
        if not in_place:
            part.unlink(missing_ok=True)
    return count


def header_line(block_size: int | None = None, origin_s: float = 0.0, disorder_s: float = 0.0) -> bytes:
    """The first line of a file, with its end."""
    optional = {"block_size": block_size, "origin_s": origin_s, "disorder_s": disorder_s}
    return (
        orjson.dumps(
            {
                "format": FORMAT_NAME,
                "version": VERSION,
                **{key: value for key, value in optional.items() if value},
            }
        )
        + b"\n"
    )


def row_line(request: TraceRequest) -> bytes:
    """One request's line, with its end."""
    row: dict[str, object] = {
        "arrival_s": request.arrival_s,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": request.num_output_tokens,
    }
    if request.block_hashes:
        row["block_hashes"] = [f"{one:x}" for one in request.block_hashes]
    if request.session:
        row["session"] = request.session
    return orjson.dumps(row) + b"\n"


def _write(file: BinaryIO, header: bytes, requests: Iterable[TraceRequest]) -> int:
    file.write(header)
    count = 0
    for count, request in enumerate(requests, start=1):  # noqa: B007 - the count is the result
        file.write(row_line(request))
    return count


def _hashes(value: object, num_prompt_tokens: int, block_size: int | None) -> tuple[int, ...]:
    if block_size is None:
        raise BadField("block_hashes", "mean nothing without a block_size in the header line")
    if not isinstance(value, list):
        raise BadField("block_hashes", f"should be a list, not {value!r:.60}")
    check_num_blocks(len(value), num_prompt_tokens, block_size, "block_hashes")
    return tuple(_hash(one) for one in value)


def _hash(text: object) -> int:
    # int(text, 16) alone would also take signs, blanks, underscores and a prefix
    if not isinstance(text, str) or not 0 < len(text) <= MAX_HASH_DIGITS or text.strip(hexdigits):
        raise BadField(
            "block_hashes", f"should hold 1 to {MAX_HASH_DIGITS} hexadecimal digits each, not {text!r:.60}"
        )
    return int(text, 16)


def _no_unknown(row: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in row:
        if key not in known:
            raise BadField(
                str(key), f"is not a key of version {VERSION} of the format; keys are: {', '.join(known)}"
            )
