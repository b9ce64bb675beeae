"""The safetensors files of a checkpoint and their headers, or a GGUF file and its table. Free of torch.

A size that a header claims allocates nothing.

A file is 8 bytes (length of the header, little-endian), the header (JSON: dtype, shape and byte range of each
tensor), then the tensors. Nothing is ever unpickled: a folder with only .bin or .pt files is refused.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import WeightsError
from .gguf_types import BLOCKS, TABLE, WEIGHTS

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32 << 20  # about 250,000 tensors in one file
MAX_INDEX_BYTES = 32 << 20
MAX_FILES = 4096
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
Shape = tuple[int, ...]
BASE_MODEL = ("embed_tokens.", "layers.", "norm.")
"""How tensors are named in a checkpoint of the base model alone, as sentence-transformers saves it: without
the ``model.`` before them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str  # as safetensors or GGUF names it
    shape: tuple[int, ...]
    begin: int  # byte in the file
    end: int


def weight_files(path: Path) -> list[Path]:
    """The model's safetensors files, sorted by name, or its GGUF file. Raises WeightsError where there are
    none or not all."""
    if (path / INDEX).exists():
        return _indexed_files(path)
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    if (path / TABLE).exists() and (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    pickled = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if pickled:
        raise WeightsError(
            f"{path} has pickled weights only ({pickled[0].name}), which are never loaded: unpickling runs "
            "code from the file. Use the safetensors version of this checkpoint, or convert it with "
            "transformers' save_pretrained."
        )
    raise WeightsError(
        f"{path} has neither model.safetensors nor {INDEX}; copy the complete checkpoint into it"
    )


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, by its headers. Raises WeightsError where a header is none, or does not
    fit its file."""
    found: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        for name, tensor in header_of(file).items():
            if name in found:
                raise WeightsError(f"{path}: tensor {name!r} is in two weight files; remove the stale one")
            found[name] = tensor
    return found


def check_tensors(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    ignored: tuple[str, ...],
) -> None:
    """All of ``expected`` is there in the right shape, and nothing else but names that end in one of
    ``ignored``, or begin with one that ends with a dot. Raises WeightsError."""
    missing = sorted(expected.keys() - found.keys())
    beginnings = tuple(part for part in ignored if part.endswith("."))
    unexpected = sorted(
        name
        for name in found.keys() - expected.keys()
        if not name.endswith(ignored) and not name.startswith(beginnings)
    )
    if missing or unexpected:
        problems = [
            f"{len(names)} {what}: {_some(names)}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise WeightsError(f"{path}: the tensors do not match config.json; {'; '.join(problems)}")
    for name, shape in expected.items():
        if found[name] != shape and not (found[name] == (1,) and shape == ()):
            raise WeightsError(
                f"{path}: tensor {name!r} has shape {list(found[name])}, config.json implies {list(shape)}: "
                "are they of one checkpoint? Download it again"
            )


def header_of(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file. Raises WeightsError."""
    try:
        first, num_bytes, header = _read_table(file) if file.name == WEIGHTS else _read_header(file)
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        found = {
            f"model.{name}" if name.startswith(BASE_MODEL) else name: _stored(entry, first, num_bytes)
            for name, entry in tensors.items()
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"{error}"
        raise WeightsError(
            f"{file} is not a readable {_format_of(file)} file ({reason:.200}); download it again"
        ) from error
    ends = sorted((tensor.begin, tensor.end) for tensor in found.values())
    if any(end > begin for (_, end), (begin, _) in pairwise(ends)):
        raise WeightsError(
            f"{file} is not a readable {_format_of(file)} file (its tensors overlap); download it again"
        )
    return found


def _format_of(file: Path) -> str:
    return "GGUF" if file.name == WEIGHTS else "safetensors"


def _read_header(file: Path) -> tuple[int, int, bytes]:
    """The first byte of its tensors, how many they are, and the header. Raises OSError or ValueError."""
    # a pipe would wait for its writer
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as handle:
        status = os.fstat(handle.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        begin = handle.read(8)
        if begin == b"version ":
            raise ValueError("it is a pointer of Git LFS, which `git lfs pull` replaces")
        length = int.from_bytes(begin, "little")
        if status.st_size < 8 or length > min(MAX_HEADER_BYTES, status.st_size - 8):
            raise ValueError(f"it has {status.st_size:,} bytes, and claims a header of {length:,}")
        return 8 + length, status.st_size - 8 - length, handle.read(length)


def _read_table(file: Path) -> tuple[int, int, bytes]:
    """The same of the table beside the file. Raises OSError."""
    return 0, file.stat().st_size, (file.parent / TABLE).read_bytes()


def _stored(entry: Any, first: int, num_bytes: int) -> StoredTensor:
    """Raises ValueError, or what a wrong type raises."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in (*shape, begin, end)):
        raise ValueError("a tensor has sizes that are no whole numbers")
    if not begin <= end <= num_bytes:
        raise ValueError(f"it holds {num_bytes:,} bytes of tensors, and its header tells of {end:,}")
    numbers, size = BLOCKS.get(entry["dtype"]) or (1, ITEM_BYTES[entry["dtype"]])
    if math.prod(shape) * size != (end - begin) * numbers or (numbers > 1 and shape[-1] % numbers):
        raise ValueError(f"a tensor of shape {list(shape)} in {entry['dtype']} has {end - begin:,} bytes")
    return StoredTensor(entry["dtype"], shape, first + begin, first + end)


def _indexed_files(path: Path) -> list[Path]:
    try:
        if (path / INDEX).stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"it is larger than {MAX_INDEX_BYTES:,} bytes")
        names = set(json.loads((path / INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WeightsError(
            f"{path / INDEX} is not a safetensors index ({error!r:.200}); download it again"
        ) from error
    if len(names) > MAX_FILES or any(
        not isinstance(name, str) or Path(name).name != name or "\0" in name for name in names
    ):
        raise WeightsError(
            f"{path / INDEX} names files outside its own folder, or more than {MAX_FILES}; download it again"
        )
    absent = sorted(name for name in names if not (path / name).exists())
    if absent:
        raise WeightsError(
            f"{path} lacks {len(absent)} of {len(names)} weight files of the index: {_some(absent)}; copy "
            "them into it"
        )
    return [path / name for name in sorted(names)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
