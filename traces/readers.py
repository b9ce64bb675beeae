"""Opens a trace file of any known format as a stream of requests in order of arrival."""

from __future__ import annotations

import csv
import gzip
import heapq
import io
import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import orjson

from .errors import TraceFileError
from .formats import FORMATS, BadField, Format, described
from .own_format import FORMAT_NAME, Header, parse_header, parse_row
from .request import Trace, TraceRequest

GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE_BYTES = 64 << 20
"""A longer line is no trace; without a limit a small gzip file could fill the memory."""
Parameters = ParamSpec("Parameters")
Parsed = TypeVar("Parsed")


def open_trace(path: Path, *, disorder_s: float = 0.0, drop_empty: bool = False) -> Trace:
    """Open a trace. Only its first rows are read now, the rest on iteration. Raises TraceError.

    ``disorder_s``: sort rows that are up to this many seconds of arrival time too late, in memory.
    ``drop_empty``: leave out requests without prompt or output tokens, which else are errors.
    """
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceFileError(path, "is empty")
    header, format = _recognized(path, first)
    if header is not None:
        order = Order(path, 0.0, max(disorder_s, header.disorder_s), drop_empty)
        return Trace(
            path.name, lambda: order.applied(_own_rows(path, header)), header.block_size, header.origin_s
        )
    assert format is not None
    order = Order(path, _origin(path, format, disorder_s), disorder_s, drop_empty)
    return Trace(path.name, lambda: order.applied(_rows(path, format)), format.block_size, order.origin_s)


def _recognized(path: Path, first: str) -> tuple[Header | None, Format | None]:
    """Our own header, or the foreign format that the first line shows."""
    if not first.lstrip().startswith("{"):
        try:
            names = next(csv.reader([first]), [])
        except csv.Error as error:
            raise TraceFileError(path, f"is no CSV: {error}", line=1) from None
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise TraceFileError(path, f"names a column twice: {twice[0]!r:.60}", line=1)
        for format in FORMATS:
            if format.kind == "csv" and set(format.fields) <= set(names):
                return None, format
        if len(names) < 2:  # whatever it is, it may be no text that should be shown
            raise TraceFileError(
                path, f"this is neither the columns of a CSV file nor a JSON object; {described()}", line=1
            )
        raise TraceFileError(
            path, f"no trace format has these columns: {', '.join(names)!r:.120}; {described()}", line=1
        )
    row = _object(path, 1, first)
    if row.get("format") == FORMAT_NAME:
        return _located(path, 1, parse_header, row), None
    for format in FORMATS:
        if format.kind == "jsonl" and any(field in row for field in format.fields):
            return None, format
    raise TraceFileError(
        path, f"no trace format has these keys: {', '.join(map(str, row))!r:.120}; {described()}", line=1
    )


def _rows(path: Path, format: Format) -> Numbered:
    for number, row in _csv(path) if format.kind == "csv" else _jsonl(path):
        yield number, _located(path, number, format.parse, row)


def _own_rows(path: Path, header: Header) -> Numbered:
    for number, row in itertools.islice(_jsonl(path), 1, None):
        yield number, _located(path, number, parse_row, row, header.block_size)


def _origin(path: Path, format: Format, disorder_s: float) -> float:
    """Unix time before which no row can arrive; 0 for formats without dates."""
    if format.origin_s is None:
        return 0.0
    for number, row in _csv(path):
        return _located(path, number, format.origin_s, row) - disorder_s
    return 0.0


def _csv(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.reader(read_lines(path), strict=True)
    try:
        names = next(reader)
        for values in reader:
            if len(values) != len(names):
                if not values:
                    continue  # an empty line
                message = f"should have {len(names)} columns ({', '.join(names)}), but has {len(values)}"
                raise TraceFileError(path, message, line=reader.line_num)
            yield reader.line_num, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise TraceFileError(path, f"is no CSV: {error}", line=reader.line_num) from None


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_lines(path), start=1):
        if line:
            yield number, _object(path, number, line)


def _object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise TraceFileError(path, f"is no JSON: {error}", line=line) from None
    if not isinstance(row, dict):
        raise TraceFileError(path, f"should be an object, not {text!r:.60}", line=line)
    return row


def _located(
    path: Path,
    line: int,
    parse: Callable[Parameters, Parsed],
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Parsed:
    try:
        return parse(*args, **kwargs)
    except BadField as error:
        raise TraceFileError(path, str(error), line=line, field=error.field) from None


def read_lines(path: Path) -> Iterator[str]:
    """Lines without their ends. The content decides whether the file is compressed. Raises TraceError."""
    number = 0
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == GZIP_MAGIC
            stream = io.BufferedReader(gzip.GzipFile(fileobj=file), 1 << 16) if packed else file
            while line := stream.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) == MAX_LINE_BYTES:
                    raise TraceFileError(
                        path, f"longer than {MAX_LINE_BYTES >> 20} MiB: this is no trace", line=number
                    )
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise TraceFileError(path, f"not UTF-8 text ({error.reason})", line=number) from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TraceFileError(
            path, f"the gzip data is damaged or cut short ({error})", line=number + 1
        ) from None
    except OSError as error:
        raise TraceFileError(path, f"cannot be read: {error.strerror or error}") from None


Numbered = Iterator[tuple[int, TraceRequest]]  # with the line where each stands


@dataclass(frozen=True, slots=True)
class Order:
    """What holds for the rows of all formats. Times in seconds."""

    path: Path
    origin_s: float  # of the arrivals as the rows give them
    disorder_s: float
    drop_empty: bool

    def applied(self, rows: Numbered) -> Iterator[TraceRequest]:
        """The requests in order of arrival, which starts at the origin. Raises TraceError."""
        checked = self._checked(rows)
        return (
            request for _, request in (self._sorted(checked) if self.disorder_s else self._in_order(checked))
        )

    def _checked(self, rows: Numbered) -> Numbered:
        for line, request in rows:
            if not request.num_prompt_tokens or not request.num_output_tokens:
                if self.drop_empty:
                    continue
                what = "prompt" if not request.num_prompt_tokens else "output"
                raise TraceFileError(
                    self.path,
                    f"a request of 0 {what} tokens; to leave such rows out: --drop-empty",
                    line=line,
                )
            if self.origin_s:  # dates have microseconds, which a float of Unix time just holds
                request = replace(request, arrival_s=round(request.arrival_s - self.origin_s, 6))
            yield line, request

    def _in_order(self, rows: Numbered) -> Numbered:
        last_s = 0.0
        for line, request in rows:
            if request.arrival_s < last_s:
                self._refuse(line, last_s - request.arrival_s)
            last_s = request.arrival_s
            yield line, request

    def _sorted(self, rows: Numbered) -> Numbered:
        waiting: list[tuple[float, int, TraceRequest]] = []  # lines make ties keep the file's order
        newest_s = 0.0
        for line, request in rows:
            if request.arrival_s < newest_s - self.disorder_s:
                self._refuse(line, newest_s - request.arrival_s)
            heapq.heappush(waiting, (request.arrival_s, line, request))
            newest_s = max(newest_s, request.arrival_s)
            while waiting[0][0] < newest_s - self.disorder_s:
                _, first, earliest = heapq.heappop(waiting)
                yield first, earliest
        while waiting:
            _, first, earliest = heapq.heappop(waiting)
            yield first, earliest

    def _refuse(self, line: int, late_s: float) -> NoReturn:
        message = (
            f"arrives {late_s:.6g} s before a row above it; to have rows sorted that stand up to S "
            "seconds too late: --disorder-s S"
        )
        raise TraceFileError(self.path, message, line=line)
