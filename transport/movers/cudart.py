"""CUDA's runtime, as far as the mover ``cuda_ipc`` needs it."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from ..errors import MoverError

HANDLE_BYTES = 64
_NON_BLOCKING, _NO_TIMING, _LAZY_PEER_ACCESS, _ANY_DIRECTION = 1, 2, 1, 4
_NOT_READY = 600
_EXPANDABLE = "expandable_segments:True"
_ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # environment variables of torch


class Column(NamedTuple):
    """A part of each row of a pool: of the first one at ``address``, of each other ``pitch`` bytes later."""

    address: int
    pitch: int

    def row(self, number: int) -> Column:
        """Return the column from this row on."""
        return Column(self.address + number * self.pitch, self.pitch)


class CudaRuntime(Protocol):
    """All methods raise MoverError with CUDA's message. Streams and events are opaque."""

    def share(self, pointer: int) -> tuple[bytes, int]:
        """(handle, offset) of device memory."""

    def map(self, handle: bytes) -> int:
        """Map another process's memory. Return its address here."""

    def unmap(self, pointer: int) -> None: ...

    def new_stream(self) -> Any: ...

    def copy(self, target: Column, source: Column, width: int, num_rows: int, stream: Any) -> None:
        """Begins a copy of ``width`` bytes of each row."""

    def record(self, stream: Any) -> Any:
        """An event that is over once all that ``stream`` has been given is done."""

    def is_over(self, event: Any) -> bool:
        """Asked of every event until it is; then the event is gone."""

    def end_stream(self, stream: Any) -> None: ...


LoadRuntime: TypeAlias = Callable[[torch.device], CudaRuntime]


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class LoadedCudart:
    """The real one, for one device."""

    def __init__(self, device: torch.device) -> None:
        """Raises MoverError where no CUDA runtime is loaded in this process."""
        loaded = re.search(r"(/\S*/libcudart\S*\.so\S*)", Path("/proc/self/maps").read_text())
        if loaded is None:
            raise MoverError("the mover cuda_ipc needs a CUDA runtime; this process has loaded none")
        self._library, self._driver = ctypes.CDLL(loaded[1]), ctypes.CDLL("libcuda.so.1")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._device = device.index or 0
        # handles go by value: ctypes has to know
        self._library.cudaIpcOpenMemHandle.argtypes = (
            ctypes.POINTER(ctypes.c_void_p),
            _Handle,
            ctypes.c_uint,
        )

    def share(self, pointer: int) -> tuple[bytes, int]:
        handle, base, size = _Handle(), ctypes.c_uint64(), ctypes.c_size_t()
        try:
            self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        except MoverError as error:
            if not any(_EXPANDABLE in os.environ.get(name, "") for name in _ALLOCATOR_OPTIONS):
                raise
            raise MoverError(
                f"CUDA shares no memory that torch allocates with {_EXPANDABLE} ({error}); unset it in "
                f"{' and '.join(_ALLOCATOR_OPTIONS)} to use the mover cuda_ipc"
            ) from None
        if self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)
        ):
            raise MoverError("CUDA does not say in which allocation the KV pool lies")
        return bytes(handle.data), pointer - base.value

    def map(self, handle: bytes) -> int:
        pointer = ctypes.c_void_p()
        self._call(
            "cudaIpcOpenMemHandle", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        return int(pointer.value or 0)

    def unmap(self, pointer: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))

    def new_stream(self) -> Any:
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def copy(self, target: Column, source: Column, width: int, num_rows: int, stream: Any) -> None:
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        to, of = pointer(target.address), pointer(source.address)
        if target.pitch == source.pitch == width:
            self._call("cudaMemcpyAsync", to, of, size(num_rows * width), _ANY_DIRECTION, stream)
        else:
            pitched = to, size(target.pitch), of, size(source.pitch)
            self._call("cudaMemcpy2DAsync", *pitched, size(width), size(num_rows), _ANY_DIRECTION, stream)

    def record(self, stream: Any) -> Any:
        event = ctypes.c_void_p()
        self._call("cudaEventCreateWithFlags", ctypes.byref(event), _NO_TIMING)
        self._call("cudaEventRecord", event, stream)
        return event

    def is_over(self, event: Any) -> bool:
        if self._call("cudaEventQuery", event, unless=_NOT_READY):
            return False
        self._call("cudaEventDestroy", event)
        return True

    def end_stream(self, stream: Any) -> None:
        self._call("cudaStreamDestroy", stream)

    def _call(self, name: str, *arguments: Any, unless: int = 0) -> int:
        """On this object's device, whatever the thread's current one is."""
        self._library.cudaSetDevice(self._device)
        error: int = getattr(self._library, name)(*arguments)
        if error:
            self._library.cudaGetLastError()  # else this thread's next kernel launch by torch would raise it
        if error not in (0, unless):
            raise MoverError(
                f"{name}: {self._library.cudaGetErrorString(error).decode()} (CUDA error {error})"
            )
        return error
