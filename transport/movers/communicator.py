"""Two processes and a way for tensors between them, by torch.distributed: NCCL where the tensors lie on a GPU, Gloo where not.

What the two libraries need to find each other (a store of keys and values) travels over the workers' encrypted control channel: nothing
listens for it. The data itself travels in the clear.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

MEET_S = 15.0  # for both ends to have said what the other needs
LOOK_S = 0.0002


class SharedStore(Store):
    """Each end's own entries are said to the other (``say(key, value)``, from any thread); the other's come by ``heard``."""

    def __init__(self, say: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._say = say
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._over = False

    def heard(self, key: str, value: bytes) -> None:
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nobody waits here any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._say(key, data)
        self.heard(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = MEET_S if timeout is None else min(MEET_S, timeout.total_seconds())
        with self._changed:
            self._changed.wait_for(lambda: self._over or all(key in self._entries for key in keys), seconds)
            if not all(key in self._entries for key in keys):
                raise RuntimeError("the peer did not say how it is reached")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._entries for key in keys)


class Communicator:
    """One of two ranks. All calls but ``close`` from one thread; each raises RuntimeError where the peer is gone or late."""

    def __init__(self, store: SharedStore, rank: int, device: torch.device, timeout_s: float) -> None:
        """Waits for the other rank."""
        self._peer, self._stream = 1 - rank, None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=timeout_s)
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, nccl)
        else:
            gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = timedelta(seconds=timeout_s)
            gloo._devices = [ProcessGroupGloo.create_default_device()]
            self._group = ProcessGroupGloo(store, rank, 2, gloo)

    def send(self, tensor: Tensor, number: int, timeout_s: float) -> None:
        """Returns once ``tensor`` has left."""
        self._finish(lambda: self._group.send([tensor], self._peer, number), timeout_s)

    def receive(self, tensor: Tensor, number: int, timeout_s: float) -> None:
        """Returns once ``tensor`` is filled."""
        self._finish(lambda: self._group.recv([tensor], self._peer, number), timeout_s)

    def _finish(self, start: Callable[[], Work], timeout_s: float) -> None:
        if self._stream is None:
            start().wait(timedelta(seconds=timeout_s))
            return
        deadline = time.monotonic() + timeout_s
        with torch.cuda.stream(self._stream):
            work = start()
            work.wait()  # the stream's wait, not ours
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise RuntimeError("the peer did not take part in time")
            time.sleep(LOOK_S)

    def close(self) -> None:
        """Also while another thread waits: that fails then, at the latest with its time-out."""
        self._group.abort()
