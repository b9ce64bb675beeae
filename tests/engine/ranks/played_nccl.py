"""NCCL, played in host memory: each rank is a thread, as with the real one."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import torch

TYPES = {2: torch.int32, 6: torch.float16, 7: torch.float32, 9: torch.bfloat16}
SUCCESS, INVALID_USAGE = 0, 5


class PlayedNccl:
    """Its functions take what ctypes gives NCCL's. ``calls``: their names, of all ranks. ``alone``: no thread
    waits for another, as on a GPU; each takes its own part for that of all."""

    def __init__(self, size: int) -> None:
        self._size, self.calls, self.alone = size, list[str](), False
        self._meeting = threading.Barrier(size)
        self._given: list[torch.Tensor | None] = [None] * size
        self._group = threading.local()  # ``calls``: of this thread, since its group began
        self._sent: dict[tuple[int, int], torch.Tensor] = {}  # from, to

    def ncclGetErrorString(self, error: int) -> bytes:
        return b"invalid usage"

    def ncclGetUniqueId(self, found: Any) -> int:
        found._obj.internal = b"here"
        return SUCCESS

    def ncclCommInitRank(self, handle: Any, size: int, found: Any, rank: int) -> int:
        assert (found.internal, size) == (b"here", self._size)
        handle._obj.value = rank + 1
        self._meeting.wait()
        return SUCCESS

    def ncclCommAbort(self, handle: Any) -> int:
        self._meeting.abort()
        return SUCCESS

    def ncclAllReduce(
        self, sent: Any, received: Any, count: Any, kind: int, operation: int, handle: Any, stream: Any
    ) -> int:
        assert operation == 0
        return self._collective("sum", sent, received, count, kind, handle)

    def ncclAllGather(self, sent: Any, received: Any, count: Any, kind: int, handle: Any, stream: Any) -> int:
        return self._collective("gather", sent, received, count, kind, handle)

    def ncclBroadcast(
        self, sent: Any, received: Any, count: Any, kind: int, root: int, handle: Any, stream: Any
    ) -> int:
        assert root == 0
        return self._collective("broadcast", sent, received, count, kind, handle)

    def ncclGroupStart(self) -> int:
        self._group.calls = []
        return SUCCESS

    def ncclSend(self, sent: Any, count: Any, kind: int, peer: int, handle: Any, stream: Any) -> int:
        self._group.calls.append(("send", sent, count.value, TYPES[kind], peer, handle.value - 1))
        return SUCCESS

    def ncclRecv(self, received: Any, count: Any, kind: int, peer: int, handle: Any, stream: Any) -> int:
        self._group.calls.append(("receive", received, count.value, TYPES[kind], peer, handle.value - 1))
        return SUCCESS

    def ncclGroupEnd(self) -> int:
        self.calls.append("exchange")
        calls = [(*call, _memory(*call[1:4])) for call in self._group.calls]
        for name, *_, peer, rank, memory in calls:
            if name == "send":
                self._sent[rank, peer] = memory.clone()
        try:
            if not self.alone:
                self._meeting.wait()
            for name, *_, peer, rank, memory in calls:
                if name == "receive":
                    memory.copy_(self._sent[(rank, peer) if self.alone else (peer, rank)])
            if not self.alone:
                self._meeting.wait()
        except threading.BrokenBarrierError:
            return INVALID_USAGE
        return SUCCESS

    def _collective(self, name: str, sent: Any, received: Any, count: Any, kind: int, handle: Any) -> int:
        rank, dtype = handle.value - 1, TYPES[kind]
        self.calls.append(name)
        own = self._given[rank] = _memory(sent, count.value, dtype).clone()
        try:
            if not self.alone:
                self._meeting.wait()
            given = [own if self.alone or each is None else each for each in self._given]
            result = {
                "sum": lambda: sum(given),
                "gather": lambda: torch.cat(given),
                "broadcast": lambda: given[0],
            }
            out = result[name]()
            if not self.alone:
                self._meeting.wait()
        except threading.BrokenBarrierError:
            return INVALID_USAGE
        _memory(received, len(out), dtype).copy_(out)
        return SUCCESS


def _memory(address: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers at an address."""
    held = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address.value)
    return torch.from_numpy(np.frombuffer(held, np.uint8)).view(dtype)
