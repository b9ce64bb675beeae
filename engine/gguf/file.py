"""A GGUF file's metadata and its table of tensors, read by the package ``gguf``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ..errors import ModelConfigError
from ..model.gguf_types import BLOCKS, PLAIN


@dataclass(frozen=True, slots=True)
class GgufTensor:
    kind: str  # a name of GGMLQuantizationType
    shape: tuple[int, ...]  # rows first
    begin: int  # byte in the file
    end: int


class _Reader(gguf.GGUFReader):
    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """The package reads on behind the file's end: an array may claim any length there."""
        if orig_offs >= len(self.data):
            raise ValueError
        return super()._get_field_parts(orig_offs, raw_type)


class GgufFile:
    """Raises ModelConfigError where it cannot be read, or has weights of a type that is not served."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if (begin := file.read(4)) != b"GGUF":
                    raise ModelConfigError(
                        f"{path} is no GGUF file: it begins with {begin!r}, not with GGUF; is it a web page "
                        "or a Git LFS pointer? Download the file itself"
                    )
            self._reader = _Reader(path)
            self.tensors = {tensor.name: _tensor(tensor) for tensor in self._reader.tensors}
        except OSError as error:
            raise ModelConfigError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
            raise ModelConfigError(
                f"{path} is cut short or damaged ({path.stat().st_size} bytes), or of GGUF version 1; "
                "download it again"
            ) from error
        if self._reader.byte_order != "I":
            raise ModelConfigError(f"{path} is a big-endian GGUF file, which is not supported")
        if int(self.get("split.count", 1)) > 1:
            raise ModelConfigError(f"{path} is one of several parts; join them: llama-gguf-split --merge")
        unknown = {tensor.kind for tensor in self.tensors.values()} - {*BLOCKS, *PLAIN}
        if unknown:
            raise ModelConfigError(
                f"{path}: weights of type {', '.join(sorted(unknown))} are not supported (supported: "
                f"{', '.join((*BLOCKS, *PLAIN))}); take another file of this model, such as Q4_K_M or Q8_0"
            )
        self.architecture = str(self.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata's value, in Python's types; an array as a list."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def own(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture."""
        return self.get(f"{self.architecture}.{key}", default)

    def floats(self, name: str) -> list[float]:
        """A float32 tensor's numbers."""
        found: NDArray[Any] = next(tensor.data for tensor in self._reader.tensors if tensor.name == name)
        return [float(number) for number in found.astype(np.float32).ravel()]


def _tensor(tensor: gguf.ReaderTensor) -> GgufTensor:
    begin, shape = int(tensor.data_offset), tuple(int(size) for size in reversed(tensor.shape))
    return GgufTensor(tensor.tensor_type.name, shape, begin, begin + int(tensor.n_bytes))
