"""Weights of a checkpoint folder, memory-mapped: safetensors, one file or several with an index; or GGUF.

Nothing is ever unpickled: a folder with only .bin or .pt files is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ...kernels.huge_pages import drop_pages, map_file
from ..errors import WeightsError
from .gguf_types import BLOCKS
from .weight_headers import StoredTensor, check_tensors, header_of, weight_files

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
STORED_DTYPES = FLOATS | {
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip


class Checkpoint:
    """The open weight files of one model. Tensors are views of the memory map until converted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: list[Tensor] = []  # what was handed out since ``drop_pages``
        self._tensors: dict[str, tuple[StoredTensor, Tensor]] = {}  # and its file's bytes
        for file in weight_files(path):
            tensors = header_of(file)
            with file.open("rb") as handle:
                mapped = map_file(handle.fileno(), file.stat().st_size)
            for name, tensor in tensors.items():
                if name in self._tensors:
                    raise WeightsError(
                        f"{path}: tensor {name!r} is in two weight files; remove the stale one"
                    )
                self._tensors[name] = tensor, mapped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop_pages()

    def drop_pages(self) -> None:
        """Give back the memory that reading the tensors so far took: the files stay in the page cache, from
        where a tensor that is used again is read again."""
        read, self._read = self._read, []
        for stored in read:
            drop_pages(stored)

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """All of ``expected`` is there in the right shape, and nothing else but names that end in one of
        ``ignored``."""
        shapes = {name: tensor.shape for name, (tensor, _) in self._tensors.items()}
        check_tensors(self._path, shapes, expected, ignored)

    @property
    def dtype(self) -> torch.dtype:
        """That of most of the weights that are not quantised."""
        sizes: Counter[str] = Counter()
        for tensor, _ in self._tensors.values():
            stored = "BF16" if tensor.dtype in BLOCKS else tensor.dtype  # GGUF's norms are F32
            if stored in FLOATS:
                sizes[stored] += math.prod(tensor.shape)
        return FLOATS[sizes.most_common(1)[0][0]] if sizes else torch.float32

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        """In the file's dtype, without a copy."""
        tensor = self.stored(name)
        if tensor.dtype not in FLOATS.values():
            raise WeightsError(
                f"{self._path}: tensor {name!r} is {tensor.dtype}; weights must be float32, bfloat16 or "
                "float16"
            )
        return tensor

    def stored(self, name: str) -> Tensor:
        """Return the tensor in its own dtype, without a copy; blocks of GGUF as uint8 [rows, bytes]."""
        tensor, mapped = self._tensors[name]
        stored = mapped[tensor.begin : tensor.end]
        self._read.append(stored)
        if tensor.dtype in BLOCKS:
            return stored.view(tensor.shape[0], -1)
        dtype = STORED_DTYPES[tensor.dtype]
        if tensor.begin % dtype.itemsize:  # no writer that we know leaves one unaligned
            stored = stored.clone()
        return stored.view(dtype).view(tensor.shape)
