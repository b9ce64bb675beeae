"""Hypothesis draws the same examples whatever was imported before: see ``tests/conftest.py``."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CONSTANTS = ", ".join(str(70_000 + 11 * i) for i in range(500))


def drawn() -> list[int]:
    seen = []

    @settings(max_examples=300, database=None)
    @given(st.integers(0, 1 << 20))
    def draw(number: int) -> None:
        seen.append(number)

    draw()
    return seen


def test_a_module_that_is_imported_changes_no_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn()
    (tmp_path / "just_imported.py").write_text(f"CONSTANTS = [{CONSTANTS}]")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("just_imported")
    assert drawn() == before
