"""Per-request records as a CSV file, written as the requests end."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..errors import SimulationError
from .records import COLUMNS, RequestRecord


@contextmanager
def record_file(path: Path | None) -> Iterator[Callable[[RequestRecord], None] | None]:
    """What a simulation calls for each record; gzip'ed if the name ends in .gz. Nothing where ``path`` is
    None. Raises SimulationError."""
    if path is None:
        yield None
        return
    try:
        opened = _opened(path)
    except OSError as error:
        raise SimulationError(f"cannot write {path}: {error.strerror or error}") from None
    with opened as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        yield lambda record: writer.writerow([_shown(value) for value in record.row()])


def _shown(value: object) -> object:
    return f"{value:.9g}" if isinstance(value, float) else value


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", newline="", encoding="utf-8")
    return path.open("w", newline="", encoding="utf-8")
