"""CUDA's runtime as the mover cuda_ipc calls it, played."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splitserve.transport.errors import MoverError
from splitserve.transport.movers import cudart
from splitserve.transport.movers.cudart import Column, LoadedCudart


def test_without_a_cuda_runtime_it_says_so() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch brings a CUDA runtime")
    with pytest.raises(MoverError, match="CUDA runtime"):
        LoadedCudart(torch.device("cuda", 0))


class PlayedCudart:
    """libcudart as ctypes loads it. Its calls fail with ``error``, which stays the thread's last error until
    that is asked for."""

    def __init__(self, error: int) -> None:
        self.error, self.last_error = error, 0
        self.calls: list[list[object]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            if name == "cudaGetLastError":
                last, self.last_error = self.last_error, 0
                return last
            if name == "cudaSetDevice":
                return 0
            self.calls.append([name, *(getattr(value, "value", value) for value in arguments)])
            self.last_error = self.error
            return self.error

        return call

    def cudaGetErrorString(self, error: int) -> bytes:
        return b"invalid argument"

    def loaded(self) -> LoadedCudart:
        runtime = LoadedCudart.__new__(LoadedCudart)
        runtime._library, runtime._device = self, 0  # type: ignore[assignment]
        return runtime


def test_a_call_that_fails_leaves_no_error_to_the_next_kernel_launch() -> None:
    library = PlayedCudart(1)
    with pytest.raises(MoverError, match="cudaStreamDestroy: invalid argument"):
        library.loaded().end_stream(0)
    assert library.last_error == 0
    library.error = cudart._NOT_READY
    assert not library.loaded().is_over(0)
    assert library.last_error == 0


def test_whole_rows_are_copied_as_one_run_and_parts_of_rows_by_their_pitches() -> None:
    library = PlayedCudart(0)
    runtime = library.loaded()
    runtime.copy(Column(1000, 32), Column(2000, 32), 32, 5, "stream")
    runtime.copy(Column(1000, 32), Column(2000, 64), 32, 5, "stream")
    assert library.calls == [
        ["cudaMemcpyAsync", 1000, 2000, 160, 4, "stream"],
        ["cudaMemcpy2DAsync", 1000, 32, 2000, 64, 32, 5, 4, "stream"],
    ]


def test_memory_in_expandable_segments_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(MoverError, match=r"expandable_segments:True.*unset it in PYTORCH_ALLOC_CONF"):
        PlayedCudart(1).loaded().share(0)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    with pytest.raises(MoverError, match=r"^cudaIpcGetMemHandle: invalid argument \(CUDA error 1\)$"):
        PlayedCudart(1).loaded().share(0)
