"""A communicator of two ranks by torch.distributed: NCCL between GPUs, Gloo between host pools. No store
listens anywhere: the libraries' rendezvous travels as entries that its owner carries to the other rank."""

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
from torch._C._distributed_c10d import ProcessGroupGloo, Store

LIMIT_S = 15.0  # a meeting or a parcel that takes longer breaks the communicator
SLACK_S = 1.0  # the libraries' own limits come first; some of their calls have none
LOOK_S, MEETING_LOOK_S = 0.0002, 0.002
WATCHDOG_S = 3600.0  # torch's own limit for a parcel: LIMIT_S always comes first
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


class Communicator(threading.Thread):
    """One rank: meets the other one, then calls ``carry_next`` with itself until that returns False. Own
    entries go to ``send_entry``, what torch.distributed raises to ``failed``; both from this thread."""

    def __init__(
        self,
        device: torch.device,
        rank: int,
        send_entry: Callable[[str, bytes], None],
        carry_next: Callable[[Communicator], bool],
        failed: Callable[[str], None],
    ) -> None:
        # Python aborts if it ends while Gloo calls back or returns. All of Gloo's calls end, NCCL's may hang.
        super().__init__(name=f"kv-nccl-{rank}", daemon=device.type == "cuda")
        self._device, self._rank, self._carry_next, self._failed = device, rank, carry_next, failed
        self._store = _Entries(send_entry)
        self._deadline: float | None = time.monotonic() + LIMIT_S  # of the meeting or parcel under way
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None
        self.start()

    @property
    def hangs(self) -> bool:
        deadline = self._deadline
        return deadline is not None and time.monotonic() > deadline + SLACK_S

    def take_entry(self, key: str, value: bytes) -> None:
        """Take one of the other rank's."""
        self._store.entries[key] = value

    def send(self, data: Tensor) -> None:
        """Return once it has left. RuntimeError where the peer is gone or late."""
        self._finish(self._group.send, data)

    def receive(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]: what the other rank sends next. RuntimeError where the peer is gone or late."""
        with torch.cuda.stream(self._stream):  # else it may be memory that a step under way still uses
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._finish(self._group.recv, data)
        return data

    def tear_down(self) -> None:
        """End the communicator. Returns at once, from any thread and whatever this one waits for."""
        self._store.is_over = True
        if self._group is not None:  # on a thread of its own, for it may wait for this one
            threading.Thread(target=self._abort, daemon=self.daemon).start()

    def run(self) -> None:
        try:
            self.meet()
            while not self._store.is_over and self._carry_next(self):
                pass
        except Exception as error:  # torch.distributed raises anything
            self._failed(str(error) or repr(error))
        self.tear_down()

    def meet(self) -> None:
        """Wait for the other rank."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            os.environ.update(WATCHDOG)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=WATCHDOG_S)
            self._group = dist.ProcessGroupNCCL(self._store, self._rank, 2, nccl)
        else:
            gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = timedelta(seconds=LIMIT_S)
            gloo._devices = [ProcessGroupGloo.create_default_device()]
            self._group = ProcessGroupGloo(self._store, self._rank, 2, gloo)
        self._deadline = None

    def _finish(self, start: Callable[[list[Tensor], int, int], Any], data: Tensor) -> None:
        self._deadline = deadline = time.monotonic() + LIMIT_S
        if self._stream is None:
            start([data], 1 - self._rank, 0).wait(timedelta(seconds=LIMIT_S))
        else:
            with torch.cuda.stream(self._stream):
                start([data], 1 - self._rank, 0).wait()  # the stream waits, this thread does not
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(self._stream)
            while not done.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > deadline:
                    self._abort()  # before the memory of ``data`` is free for others
                    raise RuntimeError("the peer did not take part in time")
                time.sleep(LOOK_S)
        self._deadline = None

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()


class _Entries(Store):
    """torch.distributed's rendezvous store, without a server. ``send``: an own entry, to the other rank."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._send, self.entries, self.is_over = send, dict[str, bytes](), False

    def set(self, key: str, value: bytes | str) -> None:
        self.entries[key] = data = value.encode() if isinstance(value, str) else bytes(value)
        self._send(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        give_up = time.monotonic() + LIMIT_S
        while not self.check(keys):
            if self.is_over or time.monotonic() > give_up:
                raise RuntimeError("the peer did not say how it is reached")
            time.sleep(MEETING_LOOK_S)

    def check(self, keys: list[str]) -> bool:
        return all(key in self.entries for key in keys)
