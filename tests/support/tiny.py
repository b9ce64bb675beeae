"""The smallest served model."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

Tiny = tuple[Path, PreTrainedModel]
