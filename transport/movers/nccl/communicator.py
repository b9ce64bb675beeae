"""The ``nccl`` mover: packed blocks by torch.distributed send and receive; NCCL between GPUs, Gloo between
host pools. This file has the communicator of two processes and its thread.

Two workers make a communicator of two ranks at their first meeting. The libraries' rendezvous travels over
the workers' encrypted control channel, so no store listens anywhere; the data itself travels in the clear.
Each parcel is announced over the control channel (lease, secret, positions) in the order in which parcels
leave. The receiver takes each into a buffer of its own and copies it into the pool only while its lease
stands, so no peer writes the pool by itself. A communicator that breaks ends with its source; the next
meeting makes another.
"""

from __future__ import annotations

import contextlib
import os
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
CLOSE_S = 0.2
WATCHDOG_S = 3600.0  # torch's own limit for a parcel: ours, PARCEL_S, always comes first
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Environment that torch reads when it makes a group. By default its watchdog and its heartbeat monitor end
the process when a peer dies or is late. Here a peer's death costs that transfer only."""


def place_of(device: torch.device) -> str:
    """Return the kind of device, and of a GPU its UUID: what two ends compare before they make a
    communicator."""
    if device.type != "cuda":
        return device.type
    return f"{device.type} {torch.cuda.get_device_properties(device).uuid}"


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
            os.environ.update(WATCHDOG)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=WATCHDOG_S)
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


class CommunicatorThread(threading.Thread):
    """Makes a communicator, then calls ``carry_next`` with it until that returns False."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        send_entry: Callable[[str, bytes], None],
        carry_next: Callable[[Communicator], bool],
        failed: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"kv-nccl-{rank}", daemon=True)
        self._rank, self._device, self._carry_next, self._failed = rank, device, carry_next, failed
        self._store = SharedStore(send_entry)
        self.communicator: Communicator | None = None

    def receive(self, key: str, value: bytes) -> None:
        """Take a rendezvous entry of the other end."""
        self._store.receive(key, value)

    def run(self) -> None:
        try:
            self.communicator = Communicator(self._store, self._rank, self._device)
            while self._carry_next(self.communicator):
                pass
        except Exception as error:  # torch.distributed raises anything
            self._failed(str(error))
        self.tear_down()

    def tear_down(self) -> None:
        """End the communicator, from any thread."""
        self._store.give_up()
        if self.communicator is not None:
            self.communicator.close()
