"""Weights of a checkpoint folder: safetensors only, memory-mapped, one file or several with an index.

Nothing is ever unpickled: a folder with only .bin or .pt files is refused.
"""

from __future__ import annotations

import json
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

from .errors import WeightsError

INDEX = "model.safetensors.index.json"
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
                    raise WeightsError(f"{path}: tensor {name!r} is in two weight files; remove the stale one")
                self._file_of[name] = handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """All of ``expected`` is there in the right shape, and nothing else but names that end in one of ``ignored``."""
        missing = sorted(expected.keys() - self._file_of.keys())
        unexpected = sorted(name for name in self._file_of.keys() - expected.keys() if not name.endswith(ignored))
        if missing or unexpected:
            told = [f"{len(names)} {what}: {_some(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names]
            raise WeightsError(f"{self._path}: the tensors do not match config.json; {'; '.join(told)}")
        for name, shape in expected.items():
            found = tuple(self._file_of[name].get_slice(name).get_shape())
            if found != shape:
                raise WeightsError(f"{self._path}: tensor {name!r} has shape {list(found)}, config.json implies {list(shape)}")

    @property
    def dtype(self) -> torch.dtype:
        """That of most of the weights."""
        sizes: Counter[str] = Counter()
        for name, handle in self._file_of.items():
            view = handle.get_slice(name)
            sizes[view.get_dtype()] += math.prod(view.get_shape())
        return STORED_DTYPES.get(sizes.most_common(1)[0][0], torch.float32) if sizes else torch.float32

    def has(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """In the file's dtype, without a copy."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if tensor.dtype not in FLOAT_DTYPES:
            raise WeightsError(f"{self._path}: tensor {name!r} is {tensor.dtype}; weights must be float32, bfloat16 or float16")
        return tensor

    def _open(self, file: Path) -> Any:
        try:
            return self._files.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file} is not a readable safetensors file ({error}); download it again") from error


def weight_files(path: Path) -> list[Path]:
    """The model's safetensors files, sorted by name."""
    if (path / INDEX).exists():
        return _indexed_files(path)
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    pickled = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if pickled:
        raise WeightsError(
            f"{path} has pickled weights only ({pickled[0].name}), and unpickling runs code from the file. "
            "Use the safetensors version of this checkpoint, or convert it with transformers' save_pretrained."
        )
    raise WeightsError(f"{path} has neither model.safetensors nor {INDEX}")


def _indexed_files(path: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{path / INDEX} is not a safetensors index ({error!r}); download it again") from error
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise WeightsError(f"{path / INDEX} names files outside its own folder")
    absent = [name for name in names if not (path / name).exists()]
    if absent:
        raise WeightsError(f"{path}: {len(absent)} weight files of the index are absent: {_some(absent)}")
    return [path / name for name in names]


def _some(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
