"""Weights of a checkpoint folder: safetensors only, memory-mapped, one file or several with an index.

Nothing is ever unpickled: a folder with only .bin or .pt files is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import WeightsError
from .weight_headers import check_tensors, weight_files

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
            if view.get_dtype() in STORED_DTYPES:
                sizes[view.get_dtype()] += math.prod(view.get_shape())
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
        """Return the tensor in its own dtype, without a copy."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def _open(self, file: Path) -> Any:
        try:
            return self._files.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{file} is not a readable safetensors file ({error}); download it again"
            ) from error
