"""Check whether a model folder can be served, by its own files.

Worker, coordinator, `splitserve up` and doctor share this check and its messages. Free of torch; a size that
config.json claims allocates nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..errors import ModelConfigError, WeightsError
from .config import ModelConfig
from .expected_tensors import expected_tensors, ignored_tensors
from .weight_headers import check_tensors, stored_tensors, weight_files

MAX_BYTES = {
    "config.json": 4 << 20,
    "generation_config.json": 1 << 20,
    "tokenizer.json": 256 << 20,
    "tokenizer_config.json": 64 << 20,
    "special_tokens_map.json": 16 << 20,
    "chat_template.json": 4 << 20,
    "chat_template.jinja": 4 << 20,
}
"""The largest known: 35 MB of tokenizer.json. A larger one would be parsed into many times its size."""


def check_model_folder(path: Path, weights: Literal["needed", "if there"] = "needed") -> ModelConfig:
    """``if there``: a coordinator needs no weights. Raises ModelConfigError or WeightsError with what to
    do."""
    if not path.is_dir():
        raise ModelConfigError(
            f"there is no folder {path}; give a Hugging Face checkpoint folder (config.json, "
            "tokenizer.json, *.safetensors), a model of the hub (ORG/NAME) or s3://BUCKET/PREFIX"
        )
    for name, most in MAX_BYTES.items():
        file = path / name
        if file.exists() and not file.is_file():
            raise ModelConfigError(f"{file} is no regular file; copy the checkpoint again")
        if file.exists() and file.stat().st_size > most:
            raise ModelConfigError(
                f"{file} has {file.stat().st_size:,} bytes, more than the {most:,} that are read; is it what "
                "its name says?"
            )
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).exists():
            raise ModelConfigError(f"{path} has no {name}; copy the complete checkpoint into it")
    config = ModelConfig.from_folder(path)
    if weights == "needed" or _has_weights(path):
        shapes = {name: tensor.shape for name, tensor in stored_tensors(path).items()}
        check_tensors(path, shapes, expected_tensors(config), ignored_tensors(config))
    return config


def _has_weights(path: Path) -> bool:
    try:
        weight_files(path)
    except WeightsError:
        return False
    return True
