"""Check whether a model folder can be served, by its own files; and the names of its content.

Worker, coordinator, `splitserve up` and doctor share this check and its messages. Free of torch; a size that
config.json claims allocates nothing.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..errors import ModelConfigError, WeightsError
from .config import ModelConfig
from .gguf_types import TABLE
from .tensors import expected_tensors, ignored_tensors
from .weight_headers import INDEX, check_tensors, stored_tensors, weight_files

if TYPE_CHECKING:
    import xxhash

FULL_HASH_BYTES = 8 << 30
EDGE_BYTES = 1 << 20
STRIDE_BYTES = 16 << 20
SAMPLE_BYTES = 64 << 10
PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"  # of images
KV_FILES = (INDEX, TABLE, "quantize_config.json", "hf_quant_config.json", PROCESSOR, PREPROCESSOR)
"""These decide KV bytes, beside config.json and the weights."""
NOT_OF_KV = frozenset(
    {"_name_or_path", "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
)
"""Fields of config.json that change no KV."""
MAX_BYTES = {
    "config.json": 4 << 20,
    "generation_config.json": 1 << 20,
    TABLE: 32 << 20,
    "hf_quant_config.json": 1 << 20,
    PROCESSOR: 1 << 20,
    PREPROCESSOR: 1 << 20,
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
            f"{path} is no folder; give a Hugging Face checkpoint folder (config.json, "
            "tokenizer.json, *.safetensors), a GGUF file, a model of the hub (ORG/NAME) or s3://BUCKET/PREFIX"
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
            advice = "copy the complete checkpoint into it"
            if name == "tokenizer.json" and (path / "tokenizer.model").exists():
                advice = (
                    "transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
                )
            raise ModelConfigError(f"{path} has no {name}; {advice}")
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


class ContentNames(NamedTuple):
    """32 hexadecimal digits each. ``kv``: the files that decide KV bytes; ``revision``: all files that are
    read."""

    kv: str
    revision: str


def content_names(path: Path) -> ContentNames:
    """Name a model's exact content; equal names mean the same content.

    xxh3_128 over files: names, sizes and content; of config.json, ``kv`` has the fields that may decide KV.
    Files above ``FULL_HASH_BYTES`` are sampled (the first MiB, which holds the tensor headers, then 64 KiB of
    every 16 MiB, and the last MiB): whole files of hundreds of GB would take minutes at every start. The
    names guard against mix-ups, not against forgery.
    """
    import xxhash  # of the extra for workers: the coordinator checks folders without it

    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    digest = xxhash.xxh3_128()
    deciding = {name: value for name, value in config.items() if name not in NOT_OF_KV}
    digest.update(json.dumps(deciding, sort_keys=True).encode())
    for file in [*_those_there(path, KV_FILES), *weight_files(path)]:
        _add_file(digest, file)
    kv = digest.hexdigest()
    for file in _those_there(path, MAX_BYTES):
        _add_file(digest, file)
    return ContentNames(kv, digest.hexdigest())


def _those_there(path: Path, names: Iterable[str]) -> list[Path]:
    return [path / name for name in names if (path / name).exists()]


def _add_file(digest: xxhash.xxh3_128, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}\0{size}\0".encode())
    if size:
        _add_content(digest, file, size)


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
