"""Ranks on GPUs: threads of one process, a GPU each, and sums by NCCL. Graphs record its calls like kernels.

torch.distributed is not used: its process groups are one for each process, and their watchdogs look at
streams that are being captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DeviceLostError, RankFailedError
from ..model.ranks import T
from .host import HostRank, Mailbox

ID_BYTES = 128
SUM = 0
DTYPES = {torch.int32: 2, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # of nccl.h


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class Communicators:
    """NCCL's library, and the communicator of each rank: made when all have asked for theirs."""

    def __init__(self, size: int, library: Any = None, stream: Callable[[], int] | None = None) -> None:
        """``library``, ``stream``: NCCL and the calling thread's stream, or what plays them. Raises
        RankFailedError where there is no NCCL."""
        self._library = library or _nccl()
        self._stream = stream or (lambda: torch.cuda.current_stream().cuda_stream)
        self._id, self._handles = UniqueId(), [ctypes.c_void_p() for _ in range(size)]
        self.is_over = False
        self._call("ncclGetUniqueId", ctypes.byref(self._id))

    def __call__(self, rank: int, name: str, *arguments: object) -> None:
        """Call this collective of NCCL in the calling thread's stream. Raises RankFailedError."""
        self._call(name, *arguments, *self._place(rank))

    def exchange(self, rank: int, sent: Tensor, received: Tensor) -> None:
        """Send part i of ``sent`` to each other rank i, and receive its for this one. Raises
        RankFailedError."""
        place, count, kind = self._place(rank), ctypes.c_size_t(sent[0].numel()), DTYPES[sent.dtype]
        self._call("ncclGroupStart")
        for other in range(len(self._handles)):
            if other != rank:
                for name, part in (("ncclSend", sent[other]), ("ncclRecv", received[other])):
                    self._call(name, ctypes.c_void_p(part.data_ptr()), count, kind, other, *place)
        self._call("ncclGroupEnd")

    def _place(self, rank: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """The rank's communicator, and the calling thread's stream."""
        if self.is_over:
            raise RankFailedError("another rank of this worker failed")
        handle = self._handles[rank]
        if not handle:
            self._call("ncclCommInitRank", ctypes.byref(handle), len(self._handles), self._id, rank)
        return handle, ctypes.c_void_p(self._stream())

    def abort(self) -> None:
        """End what any rank waits for. No rank can go on after that."""
        was_over, self.is_over = self.is_over, True
        for handle in self._handles:
            if handle and not was_over:
                self._library.ncclCommAbort(handle)

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            words = self._library.ncclGetErrorString(error).decode()
            raise RankFailedError(f"{name}: {words}")


def _nccl() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
    except OSError as error:
        raise RankFailedError(f"several GPUs need NCCL, which torch has not loaded here ({error})") from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


class NcclRank(HostRank):
    def __init__(
        self,
        number: int,
        boxes: Sequence[Sequence[Mailbox]],
        communicators: Communicators,
        device: torch.device,
    ) -> None:
        super().__init__(number, boxes)
        self._communicators, self._device = communicators, device
        self.num_calls = 0

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._collective("ncclAllReduce", x, x, SUM)
        return x

    def joined(self, part: Tensor, width: int) -> Tensor:
        rows, most = len(part), -(-width // self.size)
        padded = torch.nn.functional.pad(part, (0, most - part.shape[1])).contiguous()
        parts = padded.new_empty(self.size, rows, most)
        self._collective("ncclAllGather", padded, parts)
        return parts.transpose(0, 1).reshape(rows, -1)[:, :width].contiguous()

    def exchanged(self, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        received[self.number].copy_(parts[self.number])
        self.num_calls += 1
        self._communicators.exchange(self.number, parts, received)
        return received

    def shared(self, tokens: Tensor | None, count: int) -> Tensor:
        if tokens is None:
            tokens = torch.empty(count, dtype=torch.int32, device=self._device)
        self._collective("ncclBroadcast", tokens, tokens, 0)
        return tokens

    def checked(self, output: T) -> T:
        if self._communicators.is_over:  # sums may have been broken off
            raise DeviceLostError("a GPU of this worker failed: it ends, to be started anew")
        return output

    def fail(self) -> None:
        super().fail()
        self._communicators.abort()

    def _collective(self, name: str, sent: Tensor, received: Tensor, *which: int) -> None:
        """``which``: the operation, or the root."""
        self.num_calls += 1
        addresses = ctypes.c_void_p(sent.data_ptr()), ctypes.c_void_p(received.data_ptr())
        count = ctypes.c_size_t(sent.numel())
        self._communicators(self.number, name, *addresses, count, DTYPES[sent.dtype], *which)
