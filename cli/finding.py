"""What a check of the doctor has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A ``problem`` keeps this machine from serving; a ``note`` makes it slower or
    smaller."""

    level: Literal["ok", "note", "problem"]
    text: str
    advice: str = ""
