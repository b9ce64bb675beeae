"""The ``nccl`` mover: packed blocks by torch.distributed send and receive; NCCL between GPUs, Gloo between
host pools.

Two workers make a communicator of two ranks at their first meeting. The libraries' rendezvous travels over
the workers' encrypted control channel, so no store listens anywhere; the data itself travels in the clear.
Each parcel is announced over the control channel (nccl_sessions.py). The receiver takes it into a buffer of
its own and copies it into the pool, so no peer writes the pool by itself. A communicator that breaks ends
with its source; the next meeting makes another.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from ..errors import MoverError
from ..messages.messages import Message, PeerId
from .block_memory import BlockMemory
from .lease_book import PARCEL_BYTES, BookedTarget
from .nccl_sessions import ComingParcel, ReceivingSession, ReceivingSessions, SendingSession

LIMIT_S = 15.0  # a meeting or a parcel that takes longer breaks the communicator
SLACK_S = 1.0  # the libraries' own limits come first; some of their calls have none
LOOK_S = 0.0002
CLOSE_S = 0.2
WATCHDOG_S = 3600.0  # torch's own limit for a parcel: LIMIT_S always comes first
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Environment that torch reads when it makes a group. By default its watchdog and its heartbeat monitor end
the process when a peer dies or is late. Here a peer's death costs that transfer only."""
_numbers = itertools.count(time.time_ns())  # of sessions: greater than all before, also after a restart
_log = logging.getLogger(__name__)


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
        self._send, self._entries, self._is_over = send, dict[str, bytes](), False
        self._changed = threading.Condition()

    def receive(self, key: str, value: bytes) -> None:
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def give_up(self) -> None:
        """End every wait."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._send(key, data)
        self.receive(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = LIMIT_S if timeout is None else min(LIMIT_S, timeout.total_seconds())
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self.check(keys), seconds)
            if not self.check(keys):
                raise RuntimeError("the peer did not say how it is reached")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)


class Communicator(threading.Thread):
    """One of two ranks: makes the communicator, then calls ``carry_next`` with itself until that returns
    False. What torch.distributed raises goes to ``failed``."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        send_entry: Callable[[str, bytes], None],
        carry_next: Callable[[Communicator], bool],
        failed: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"kv-nccl-{rank}", daemon=True)
        self.expected: SimpleQueue[ComingParcel | None] = SimpleQueue()
        self._is_over = False
        self._rank, self._device, self._carry_next, self._failed = rank, device, carry_next, failed
        self._store = SharedStore(send_entry)
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None
        self.expect, self.receive = self.expected.put, self._store.receive
        self.start()

    def run(self) -> None:
        try:
            self.meet()
            while not self._is_over and self._carry_next(self):
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

    def send_data(self, data: Tensor) -> None:
        """Return once it has left. RuntimeError where the peer is gone or late."""
        self._finish(self._group.send, data)

    def receive_data(self, data: Tensor) -> None:
        """Return once it is filled. RuntimeError where the peer is gone or late."""
        self._finish(self._group.recv, data)

    def _finish(self, start: Callable[[list[Tensor], int, int], Any], data: Tensor) -> None:
        deadline = time.monotonic() + LIMIT_S
        if self._stream is None:
            start([data], 1 - self._rank, 0).wait(timedelta(seconds=LIMIT_S))
            return
        with torch.cuda.stream(self._stream):
            start([data], 1 - self._rank, 0).wait()  # the stream waits, this thread does not
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                self._abort()  # before the memory of ``data`` is free for others
                raise RuntimeError("the peer did not take part in time")
            time.sleep(LOOK_S)

    def tear_down(self) -> None:
        """End the communicator. Returns at once, from any thread and whatever this one waits for."""
        self._is_over = True
        self._store.give_up()
        self.expected.put(None)
        if self._group is not None:  # on a thread of its own, for it may wait for this one
            threading.Thread(target=self._abort, daemon=True).start()

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()


class NcclSource(SendingSession):
    """One for each decode worker: a session, and a communicator that sends its parcels."""

    def __init__(self, address: bytes, memory: BlockMemory, shape: tuple[int, ...]) -> None:
        """``shape``: of the own pool. Make the communicator in the background. MoverError where the peer's
        pool lies on another kind of device, or on the same GPU."""
        ours, theirs = place_of(memory.device), address.decode(errors="replace")
        if ours.split()[:1] != theirs.split()[:1]:
            raise MoverError(
                f"the mover nccl needs pools of one kind; here it is {ours}, at the peer {theirs}"
            )
        if memory.device.type == "cuda" and ours == theirs:
            raise MoverError("NCCL connects no two processes on one GPU: use cuda_ipc there")
        super().__init__(shape, next(_numbers), LIMIT_S + SLACK_S, time.monotonic)
        self._memory = memory
        self.communicator = Communicator(0, memory.device, self.send_entry, self._send_next, self._broke)

    def receive(self, message: Message) -> None:
        if (entry := self.entry_in(message)) is not None:
            self.communicator.receive(entry.key, entry.value)

    def close(self) -> tuple[()]:
        self.close_session()
        self.communicator.tear_down()
        self.communicator.join(CLOSE_S)  # one that waits for the peer ends by its own time-out
        return ()

    def _send_next(self, communicator: Communicator) -> bool:
        self.met()
        if (parcel := self.wait_for_next()) is None:
            return False
        communicator.send_data(self._memory.pack(parcel.blocks, parcel.layers))
        self.left(parcel)
        return True

    def _broke(self, reason: str) -> None:
        self.fail(f"the communicator with the decode worker broke: {reason}")


class NcclTarget(BookedTarget):
    """For all writers: their sessions, and a communicator for each. ``shape`` is the pool's."""

    def __init__(self, memory: BlockMemory, shape: tuple[int, ...]) -> None:
        super().__init__(shape[1], shape[2])
        self._memory = memory
        self.sessions = ReceivingSessions(self._book, shape[1], shape[2], PARCEL_BYTES, self._begin)

    def address(self, peer: PeerId) -> bytes:
        with self._lock:
            self.sessions.meet(peer)
        return place_of(self._memory.device).encode()

    def shut_out(self, peer: PeerId) -> bool:
        """True at once: only this process writes."""
        with self._lock:
            self.sessions.shut_out(peer)
        return True

    def receive(self, peer: PeerId, message: Message) -> None:
        with self._lock:
            self.sessions.receive(peer, message)

    def take_messages(self) -> list[tuple[PeerId, Message]]:
        with self._lock:
            return self.sessions.take_messages()

    def close_all(self) -> None:
        self._close_book()
        sessions = [session for session in self.sessions.sessions.values() if session is not None]
        with self._lock:
            for session in sessions:
                self.sessions.end(session, "the decode worker ends")
        for session in sessions:
            session.end.join(CLOSE_S)

    def _begin(self, session: ReceivingSession[Communicator]) -> Communicator:
        return Communicator(
            1,
            self._memory.device,
            partial(self._send_entry, session),
            partial(self._receive_next, session),
            partial(self._broke, session),
        )

    def _send_entry(self, session: ReceivingSession[Communicator], key: str, value: bytes) -> None:
        with self._lock:
            self.sessions.send_entry(session, key, value)
            self._news.set()

    def _receive_next(self, session: ReceivingSession[Communicator], communicator: Communicator) -> bool:
        if (coming := communicator.expected.get()) is None:
            return False
        packed = torch.empty(coming.num_bytes, dtype=torch.uint8, device=self._memory.device)
        communicator.receive_data(packed)
        with self._lock:
            if (claim := self.sessions.received(session)) is not None:
                self._memory.unpack(packed, claim.blocks, coming.layers)
                self._arrived(self._book.complete(claim))
        return True

    def _broke(self, session: ReceivingSession[Communicator], reason: str) -> None:
        with self._lock:
            is_news = self.sessions.end(session, reason)
            self._news.set()
        if is_news:
            _log.warning("the communicator with %s broke: %s", session.peer[0], reason)
