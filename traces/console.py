"""The console and the tables of commands' results."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

UNBOUNDED = 10_000
"""Columns: no line of a result is as long."""


def result_console() -> Console:
    """Return a console of the terminal's width; a pipe or a file gets lines of any length."""
    console = Console()
    return console if console.is_terminal else Console(width=UNBOUNDED)


def figures_table(*names: str, words: int = 1) -> Table:
    """A table that a narrow terminal folds: no digit is cut. ``words``: the first columns that hold no
    figures. A title is printed before it: a table's own wraps where that is narrower."""
    columns = [
        Column(name, justify="left" if i < words else "right", overflow="fold")
        for i, name in enumerate(names)
    ]
    edges: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
    return Table(*columns, **edges)
