"""A short name for a model's exact content: equal names mean the same model.

xxh3_128 over config, tokenizer and weight files: names, sizes and content. Files above ``FULL_HASH_BYTES``
are sampled (the first MiB, which holds the tensor headers, then 64 KiB of every 16 MiB, and the last MiB):
whole files of hundreds of GB would take minutes at every start. The fingerprint guards against mix-ups, not
against forgery.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import xxhash

from .weight_headers import weight_files

FULL_HASH_BYTES = 8 << 30
EDGE_BYTES = 1 << 20
STRIDE_BYTES = 16 << 20
SAMPLE_BYTES = 64 << 10
DESCRIPTION_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def model_fingerprint(path: Path) -> str:
    """32 hexadecimal digits."""
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
