"""Weights of a checkpoint folder, memory-mapped: safetensors, one file or several with an index; or GGUF.

Nothing is ever unpickled: a folder with only .bin or .pt files is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...kernels.huge_pages import drop_pages, map_file
from ..errors import WeightsError
from .gguf_types import BLOCKS, WEIGHTS
from .weight_headers import StoredTensor, check_tensors, header_of, weight_files

STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FLOAT_DTYPES = tuple(STORED_DTYPES.values())


class Checkpoint:
    """The open weight files of one model. Tensors are views of the memory map until converted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = ExitStack()
        self._file_of: dict[str, Any] = {}
        for file in weight_files(path):
            handle = self._open(file)
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if name in self._file_of:
                    raise WeightsError(
                        f"{path}: tensor {name!r} is in two weight files; remove the stale one"
                    )
                self._file_of[name] = handle

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """All of ``expected`` is there in the right shape, and nothing else but names that end in one of
        ``ignored``."""
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._file_of.items()}
        check_tensors(self._path, shapes, expected, ignored)

    @property
    def dtype(self) -> torch.dtype:
        """That of most of the weights that are not quantised."""
        sizes: Counter[str] = Counter()
        for name, handle in self._file_of.items():
            view = handle.get_slice(name)
            stored = "BF16" if view.get_dtype() in BLOCKS else view.get_dtype()  # GGUF's norms are F32
            if stored in STORED_DTYPES:
                sizes[stored] += math.prod(view.get_shape())
        return STORED_DTYPES[sizes.most_common(1)[0][0]] if sizes else torch.float32

    def has(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """In the file's dtype, without a copy."""
        tensor = self.stored(name)
        if tensor.dtype not in FLOAT_DTYPES:
            raise WeightsError(
                f"{self._path}: tensor {name!r} is {tensor.dtype}; weights must be float32, bfloat16 or "
                "float16"
            )
        return tensor

    def stored(self, name: str) -> Tensor:
        """Return the tensor in its own dtype, without a copy; blocks of GGUF as uint8 [rows, bytes]."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def _open(self, file: Path) -> Any:
        if file.name == WEIGHTS:
            tensors = GgufTensors(file)
            self._files.callback(tensors.drop)
            return tensors
        try:
            return self._files.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{file} is not a readable safetensors file ({error}); download it again"
            ) from error


class GgufTensors:
    """A GGUF file with the methods of an open safetensors file."""

    def __init__(self, file: Path) -> None:
        self._tensors = header_of(file)
        with file.open("rb") as handle:
            self._bytes = map_file(handle.fileno(), file.stat().st_size)

    def drop(self) -> None:
        """Give back the memory that reading took."""
        drop_pages(self._bytes)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> GgufSlice:
        return GgufSlice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        stored = self._bytes[tensor.begin : tensor.end]
        if tensor.dtype in BLOCKS:
            return stored.view(tensor.shape[0], -1)
        return stored.view(STORED_DTYPES[tensor.dtype]).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class GgufSlice:
    tensor: StoredTensor

    def get_shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def get_dtype(self) -> str:
        return self.tensor.dtype
