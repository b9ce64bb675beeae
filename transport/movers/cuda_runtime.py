"""The few calls of the CUDA runtime that the ``cuda_ipc`` mover needs, by ctypes on the library that torch has loaded. Nothing is decided
here, so that all else can be tested with a stand-in.

Memory that one process shares is named by a handle of 64 bytes, which another process on the same machine maps; ``offset`` is where the
pool begins in the allocation that the handle names.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, Protocol

from ..errors import MoverError

HANDLE_BYTES = 64
_NON_BLOCKING, _NO_TIMING, _LAZY_PEER_ACCESS, _ANY_DIRECTION = 1, 2, 1, 4
_NOT_READY = 600


class CudaRuntime(Protocol):
    """All raise MoverError with what CUDA says. Streams and events are opaque."""

    def share(self, pointer: int) -> tuple[bytes, int]:
        """(handle, offset) of device memory."""

    def map(self, handle: bytes) -> int:
        """Address here of what another process shares."""

    def unmap(self, pointer: int) -> None: ...

    def new_stream(self) -> Any: ...

    def copy(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        """Begins a copy between device addresses."""

    def record(self, stream: Any) -> Any:
        """An event that is over once all that ``stream`` has been given is done."""

    def is_over(self, event: Any) -> bool:
        """Asked of every event until it is; then the event is gone."""

    def end_stream(self, stream: Any) -> None: ...


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class LoadedCudart:
    """The real one, for one device."""

    def __init__(self, device: int) -> None:
        """Raises MoverError where no CUDA runtime is loaded in this process."""
        loaded = re.search(r"(/\S*/libcudart\S*\.so\S*)", Path("/proc/self/maps").read_text())
        if loaded is None:
            raise MoverError("the mover cuda_ipc needs a CUDA runtime; this process has loaded none")
        self._library, self._driver = ctypes.CDLL(loaded[1]), ctypes.CDLL("libcuda.so.1")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._device = device
        # handles go by value: ctypes has to know
        self._library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint)

    def share(self, pointer: int) -> tuple[bytes, int]:
        handle, base, size = _Handle(), ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        if self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)):
            raise MoverError("CUDA does not say in which allocation the KV pool lies")
        return bytes(handle.data), pointer - base.value

    def map(self, handle: bytes) -> int:
        pointer = ctypes.c_void_p()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return int(pointer.value or 0)

    def unmap(self, pointer: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))

    def new_stream(self) -> Any:
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def copy(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        size = ctypes.c_size_t(num_bytes)
        self._call("cudaMemcpyAsync", ctypes.c_void_p(target), ctypes.c_void_p(source), size, _ANY_DIRECTION, stream)

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
        if error not in (0, unless):
            raise MoverError(f"{name}: {self._library.cudaGetErrorString(error).decode()} (CUDA error {error})")
        return error
