"""The live environment: the monotonic clock, ZeroMQ channels, the model's KV blocks, and movers between
processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import zmq

from .channels.channels import DealerChannel, RouterChannel
from .channels.keys import ClusterKey
from .environment import Channel, Environment, Listener
from .errors import MoverError
from .messages.messages import Message, Met
from .movers.block_memory import BlockPool, write_block
from .movers.checksum import DeviceChecksums, RunningChecksums, block_checksum, checksums
from .movers.interface import PutSource
from .movers.opening import open_source
from .process.host import host_identity

ENDED = frozenset("ZXx")
"""States (proc(5)) of a process of which nothing runs any more, even if its parent has not taken notice
yet."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of this machine; its id alone may have been given to another since.

    ``start_time``: clock ticks since the machine's start, from /proc. psutil adds the boot time, which it
    reads each time anew: after the clock was set (a virtual machine that was resumed) a running process would
    be taken for another one, and the blocks that it still writes would be reused."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process that has this id now; None where there is none. Raises OSError where that cannot be
        seen."""
        seen = _look(pid)
        return cls(pid, seen[1]) if seen is not None else None

    def alive(self) -> bool:
        """False once it has ended, a zombie included."""
        try:
            seen = _look(self.pid)
        except OSError:  # no descriptor left, perhaps for a moment only: asked again soon
            return True
        return seen is not None and seen[0] not in ENDED and seen[1] == self.start_time


def _look(pid: int) -> tuple[str, int] | None:
    """(state, start time) of the process that has this id now."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # after its name, which may hold anything
    return fields[0], int(fields[19])


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class LiveNetwork:
    """ZeroMQ channels under the cluster's key; each is registered with ``poller`` until it is closed."""

    def __init__(self, key: ClusterKey | None, poller: zmq.Poller) -> None:
        self._key, self._poller = key, poller
        self._open: dict[object, DealerChannel | RouterChannel] = {}  # by socket

    @property
    def host(self) -> str:
        return host_identity()

    def connect(self, address: str, identity: bytes, allowed: Collection[type[Message]]) -> DealerChannel:
        channel = DealerChannel.connect(address, identity, self._key, allowed)
        self._register(channel)
        return channel

    def listen(self, address: str, allowed: Collection[type[Message]]) -> RouterChannel:
        channel = RouterChannel.bind(address, self._key, allowed)
        self._register(channel)
        return channel

    def ready(self) -> set[object]:
        return {socket for socket, _ in self._poller.poll(0)}

    def close(self, channel: Channel | Listener, linger_s: float = 0.0) -> None:
        self._take_out(channel).close(linger_s)

    def hand_over(self, channels: Sequence[Channel]) -> LiveNetwork:
        other = LiveNetwork(self._key, zmq.Poller())
        for channel in channels:
            other._register(self._take_out(channel))
        return other

    def process(self, pid: int) -> ProcessIdentity | None:
        return ProcessIdentity.of(pid)

    def _register(self, channel: DealerChannel | RouterChannel) -> None:
        self._open[channel.socket] = channel
        self._poller.register(channel.socket, zmq.POLLIN)

    def _take_out(self, channel: Channel | Listener) -> DealerChannel | RouterChannel:
        taken = self._open.pop(channel.socket)
        self._poller.unregister(taken.socket)
        return taken


class LiveDevice:
    """The KV cache, whose blocks are read, written and summed where it lies."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._shape, self.sums_on_gpu = pool.shape, not isinstance(pool, np.ndarray)
        self._sent: RunningChecksums | DeviceChecksums
        self._checksums: Callable[[Sequence[int]], list[int]]
        if isinstance(pool, np.ndarray):
            self._sent, self._checksums = RunningChecksums(pool), partial(checksums, pool)
        else:
            self._sent, self._checksums = DeviceChecksums(pool.checksums), pool.checksums

    @property
    def num_layers(self) -> int:
        return int(self._shape[1])

    @property
    def block_bytes(self) -> int:
        return int(self._shape[1] * self._shape[2])

    def write_test_block(self, block: int, seed: Sequence[int]) -> None:
        step, start = np.random.default_rng(seed).integers(0, 1 << 64, 2, np.uint64)
        words = np.arange(-(-self.block_bytes // 8), dtype=np.uint64) * (step | np.uint64(1)) + start
        data = words.view(np.uint8)[: self.block_bytes]  # no two words are the same
        write_block(self._pool, block, data)
        if self.sums_on_gpu and self.checksums([block]) != [block_checksum(data)]:
            raise MoverError("the GPU's checksum of a block is not that of its bytes")

    def add_sent(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> None:
        self._sent.add(blocks, first_layer, num_layers)

    def sent_checksums(self, blocks: Sequence[int]) -> list[int]:
        return self._sent.of(blocks)

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return self._checksums(blocks)


class LiveMover:
    """``plaintext``: whether KV blocks may leave unencrypted."""

    def __init__(self, pool: BlockPool, plaintext: bool) -> None:
        self._pool, self._plaintext = pool, plaintext

    def open(self, met: Met) -> PutSource:
        return open_source(met, self._pool, self._plaintext)


def live_environment(
    pool: BlockPool, key: ClusterKey | None, poller: zmq.Poller, plaintext: bool
) -> Environment:
    """What a worker of this process is given; its channels are registered with ``poller``."""
    return Environment(
        MonotonicClock(), LiveNetwork(key, poller), LiveDevice(pool), LiveMover(pool, plaintext)
    )
