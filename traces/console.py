"""The console, the tables and the files of commands' results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Column, Table

UNBOUNDED = 10_000
"""Columns: no line of a result is as long."""


def result_console() -> Console:
    """Return a console of the terminal's width; a pipe or a file gets lines of any length."""
    console = Console()
    return console if console.is_terminal else Console(width=UNBOUNDED)


@contextmanager
def writing(path: Path, kind: type[Exception]) -> Iterator[None]:
    """Raise ``kind`` in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: cannot be written: {error.strerror or error}") from None


def write_json(path: Path, content: Any, kind: type[Exception]) -> None:
    """Raises ``kind`` where the file cannot be written."""
    with writing(path, kind):
        path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n")


def figures_table(*names: str, words: int = 1) -> Table:
    """A table that a narrow terminal folds: no digit is cut. ``words``: the first columns that hold no
    figures. A title is printed before it: a table's own wraps where that is narrower."""
    columns = [
        Column(name, justify="left" if i < words else "right", overflow="fold")
        for i, name in enumerate(names)
    ]
    edges: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
    return Table(*columns, **edges)
