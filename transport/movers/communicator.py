"""Two processes and a way for tensors between them by torch.distributed: NCCL between GPUs, Gloo between host
pools.

What the libraries need to find each other travels over the workers' encrypted control channel, so no store
listens anywhere. The data itself travels in the clear."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

MEET_S = 15.0  # both ends must have exchanged their addresses by then
PARCEL_S = 10.0  # a parcel that has not left, or not come, by then breaks the communicator
LOOK_S = 0.0002


class SharedStore(Store):
    """torch.distributed's rendezvous store, without a server: own entries go to the peer by ``send(key,
    value)``, from any thread; the peer's come by ``receive``."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._send = send
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._over = False

    def receive(self, key: str, value: bytes) -> None:
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def give_up(self) -> None:
        """End every wait."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._send(key, data)
        self.receive(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = MEET_S if timeout is None else min(MEET_S, timeout.total_seconds())
        with self._changed:
            self._changed.wait_for(lambda: self._over or self.check(keys), seconds)
            if not self.check(keys):
                raise RuntimeError("the peer did not say how it is reached")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)


class Communicator:
    """One of two ranks. Call everything but ``close`` from one thread; RuntimeError where the peer is gone or
    late."""

    def __init__(self, store: SharedStore, rank: int, device: torch.device) -> None:
        """Wait for the other rank."""
        self._peer, self._stream = 1 - rank, None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=PARCEL_S)
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, nccl)
        else:
            gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = timedelta(seconds=PARCEL_S)
            gloo._devices = [ProcessGroupGloo.create_default_device()]
            self._group = ProcessGroupGloo(store, rank, 2, gloo)

    def send(self, tensor: Tensor, number: int) -> None:
        """Return once ``tensor`` has left."""
        self._finish(lambda: self._group.send([tensor], self._peer, number))

    def receive(self, tensor: Tensor, number: int) -> None:
        """Return once ``tensor`` is filled."""
        self._finish(lambda: self._group.recv([tensor], self._peer, number))

    def _finish(self, start: Callable[[], Work]) -> None:
        if self._stream is None:
            start().wait(timedelta(seconds=PARCEL_S))
            return
        deadline = time.monotonic() + PARCEL_S
        with torch.cuda.stream(self._stream):
            work = start()
            work.wait()  # the stream waits, this thread does not
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise RuntimeError("the peer did not take part in time")
            time.sleep(LOOK_S)

    def close(self) -> None:
        """Also while another thread waits: its call fails then, at the latest with its time-out."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()
