"""The ``cuda_ipc`` mover: the decode worker's pool on a GPU, mapped into a prefill worker of the same host; a
put is a copy from device to device on a stream of its own, beside the computation. The two may share one GPU.

The handle travels over the encrypted control channel as 64 bytes that only CUDA reads. As with ``shm``, a
process that has mapped the pool can write as long as it lives.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import MoverError
from ..messages.messages import PeerId
from .interface import Arrival, BackgroundSource, Items, OneSidedTarget, PeerProcess, layer_slice, runs

HANDLE_BYTES = 64
PUT_S, SLOWEST_BYTES_PER_S = 5.0, 1e9  # a put may take that long, and as long as its bytes at that rate
CLOSE_S, LOOK_S = 5.0, 0.001
_ADDRESS = struct.Struct(f"<{HANDLE_BYTES}sQi")  # handle, offset of the pool, process id


class CudaIpcTarget(OneSidedTarget):
    """The receiving side, for all writers."""

    def __init__(self, pointer: int, cuda: CudaRuntime) -> None:
        """``pointer``: the pool's address on its device. Raises MoverError where CUDA cannot share it."""
        self._address = _ADDRESS.pack(*cuda.share(pointer), os.getpid())

    def address(self, peer: PeerId) -> bytes:
        return self._address


class CudaIpcSource(BackgroundSource):
    """The sending side: the peer's pool, mapped."""

    def __init__(
        self, address: bytes, num_blocks: int, pointer: int, shape: Sequence[int], cuda: CudaRuntime
    ) -> None:
        """``pointer``, ``shape``: of the own pool. Raises MoverError where the peer's cannot be mapped."""
        if len(address) != _ADDRESS.size:
            raise MoverError("the decode worker shares no pool on a GPU")
        handle, offset, pid = _ADDRESS.unpack(address)
        self._num_blocks, self._pointer, self._shape, self._cuda = num_blocks, pointer, tuple(shape), cuda
        super().__init__()
        self._process = PeerProcess(pid)
        try:
            self._mapped = cuda.map(handle)
            self._target = self._mapped + offset
            self._stream = cuda.new_stream()
        except MoverError:
            self._process.close()
            raise

    def put(
        self, lease: int, secret: bytes, items: Items, first_layer: int = 0, num_layers: int | None = None
    ) -> None:
        layers = layer_slice(self._shape, first_layer, num_layers)
        found = runs(items, layers, self._shape, self._num_blocks, self._pointer, self._target)
        self._process.check()
        for run in found:
            self._cuda.copy(run.target, run.source, run.num_bytes, self._stream)
        seconds = PUT_S + sum(run.num_bytes for run in found) / SLOWEST_BYTES_PER_S
        self._begin(lease, items, self._cuda.record(self._stream), seconds)

    def poll(self) -> list[Arrival]:
        self._process.check()  # also when idle: the memory of a dead process stays as long as it is mapped
        left: list[Arrival] = []
        while self._puts and self._cuda.is_over(self._puts[0].handle):  # one stream: they end in order
            left += self._puts.pop(0).arrivals
        if self._puts and time.monotonic() > self._puts[0].deadline:
            raise MoverError("a copy between GPUs was not complete in time")
        return left

    def close(self) -> tuple[()]:
        """Waits for what is under way. Raises MoverError where the GPU does not end it: only the end of this
        process can then be believed to end the writing, so nobody may catch it and go on."""
        self._process.close()
        self._begin(0, (), self._cuda.record(self._stream), 0.0)  # behind copies of a put that raised
        until = time.monotonic() + CLOSE_S
        while self._puts:
            if self._cuda.is_over(self._puts[0].handle):
                self._puts.pop(0)
            elif time.monotonic() > until:
                raise MoverError("copies between GPUs do not end: this worker has to be started anew")
            else:
                time.sleep(LOOK_S)
        self._cuda.unmap(self._mapped)
        self._cuda.end_stream(self._stream)
        return ()


_NON_BLOCKING, _NO_TIMING, _LAZY_PEER_ACCESS, _ANY_DIRECTION = 1, 2, 1, 4
_NOT_READY = 600
_EXPANDABLE = "expandable_segments:True"
_ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # environment variables of torch


class CudaRuntime(Protocol):
    """All methods raise MoverError with CUDA's message. Streams and events are opaque."""

    def share(self, pointer: int) -> tuple[bytes, int]:
        """(handle, offset) of device memory."""

    def map(self, handle: bytes) -> int:
        """Map another process's memory. Return its address here."""

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

    def copy(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        size = ctypes.c_size_t(num_bytes)
        self._call(
            "cudaMemcpyAsync", ctypes.c_void_p(target), ctypes.c_void_p(source), size, _ANY_DIRECTION, stream
        )

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
