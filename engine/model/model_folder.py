"""Check whether a model folder can be served, by its own files; and its fingerprint.

Worker, coordinator, `splitserve up` and doctor share this check and its messages. Free of torch; a size that
config.json claims allocates nothing.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import ModelConfigError, WeightsError
from .config import ModelConfig, expected_tensors, ignored_tensors
from .weight_headers import check_tensors, stored_tensors, weight_files

if TYPE_CHECKING:
    import xxhash

FULL_HASH_BYTES = 8 << 30
EDGE_BYTES = 1 << 20
STRIDE_BYTES = 16 << 20
SAMPLE_BYTES = 64 << 10
DESCRIPTION_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
MAX_BYTES = {
    "config.json": 4 << 20,
    "generation_config.json": 1 << 20,
    "hf_quant_config.json": 1 << 20,
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


def model_fingerprint(path: Path) -> str:
    """Name a model's exact content: 32 hexadecimal digits; equal names mean the same model.

    xxh3_128 over config, tokenizer and weight files: names, sizes and content. Files above
    ``FULL_HASH_BYTES`` are sampled (the first MiB, which holds the tensor headers, then 64 KiB of every
    16 MiB, and the last MiB): whole files of hundreds of GB would take minutes at every start. The
    fingerprint guards against mix-ups, not against forgery.
    """
    import xxhash  # of the extra for workers: the coordinator checks folders without it

    digest = xxhash.xxh3_128()
    described = [path / name for name in DESCRIPTION_FILES if (path / name).exists()]
    for file in [*described, *weight_files(path)]:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        if size:
            _add_content(digest, file, size)
    return str(digest.hexdigest())


def _add_content(digest: xxhash.xxh3_128, file: Path, size: int) -> None:
    with (
        file.open("rb") as handle,
        mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
    ):
        if size <= FULL_HASH_BYTES:
            digest.update(view)
            return
        digest.update(view[:EDGE_BYTES])
        for start in range(STRIDE_BYTES, size - EDGE_BYTES, STRIDE_BYTES):
            digest.update(view[start : start + SAMPLE_BYTES])
        digest.update(view[-EDGE_BYTES:])
