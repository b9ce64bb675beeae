"""Results of commands: whole in a pipe, and with every digit in a narrow terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from splitserve.traces.console import figures_table, result_console


@pytest.mark.parametrize("width", [80, 40, 24])
def test_a_narrow_terminal_folds_figures_and_cuts_none(width: int) -> None:
    table = figures_table("tenant", "prompt tokens", "cached", "output tokens", "seconds")
    table.add_row("acme", "1,234,567", "2,345,678", "3,456,789", "4,567,890")
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert sorted(re.sub(r"\D", "", shown)) == sorted("1234567234567834567894567890")


def test_no_line_of_a_pipe_is_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "word " * 200
    result_console().print(sentence)
    assert capsys.readouterr().out == f"{sentence}\n"
