"""The lines of a text file that may be gzip'ed, one at a time."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

from .errors import TraceFileError

GZIP_MAGIC = b"\x1f\x8b"
# a longer line is no trace; without a limit a small gzip file could fill the memory
MAX_LINE_BYTES = 64 << 20


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
