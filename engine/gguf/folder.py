"""A folder as of a Hugging Face checkpoint that stands for a GGUF file: its metadata as config.json,
tokenizer.json and so on, a table of its tensors, and a link to it. Weights are not copied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..errors import ModelConfigError
from ..model.gguf_types import TABLE, WEIGHTS
from .config import config_of
from .file import GgufFile
from .tensors import tensors_of
from .tokenizer import tokenizer_config_of, tokenizer_of

FORMAT = 3
"""Increased whenever the folder's content changes."""
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files that are taken in place of the metadata where they lie beside the GGUF file."""


def write_folder(path: Path, folder: Path) -> None:
    """``folder``: there, and empty. Raises ModelConfigError where the file cannot be served, or OSError."""
    try:
        _fill(folder, GgufFile(path))
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ModelConfigError(
            f"{path}: its metadata has a value of the wrong type ({error!r:.200}); download it again"
        ) from error


def _fill(folder: Path, file: GgufFile) -> None:
    path = file.path
    config = config_of(file)
    _write(folder / "config.json", config)
    entries = {
        name: {"dtype": found.kind, "shape": found.shape, "data_offsets": (found.begin, found.end)}
        for name, found in tensors_of(file, config["architectures"][0]).items()
    }
    _write(folder / TABLE, entries)
    (folder / WEIGHTS).symlink_to(path.resolve())
    for name in BESIDE:
        if (path.parent / name).is_file():
            shutil.copyfile(path.parent / name, folder / name)
    if not (folder / "tokenizer.json").exists():
        tokenizer_of(file).save(str(folder / "tokenizer.json"))
    if not (folder / "tokenizer_config.json").exists():
        _write(folder / "tokenizer_config.json", tokenizer_config_of(file))
        template = file.get("tokenizer.chat_template")
        if template and not (folder / "chat_template.jinja").exists():
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
