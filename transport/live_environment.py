"""The live environment: the monotonic clock, ZeroMQ channels, the model's KV blocks, and movers between
processes."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Protocol

import zmq

from .channels.channels import DealerChannel, RouterChannel
from .channels.keys import ClusterKey
from .environment import Channel, Environment, Listener
from .messages.messages import Message, Met
from .movers.block_memory import DevicePool
from .movers.checksum import DeviceChecksums, RunningChecksums, checksums
from .movers.interface import Pool, PutSource
from .movers.opening import ON_DEVICE, open_source
from .process.host import host_identity
from .process.liveness import ProcessIdentity


class Blocks(Protocol):
    """The KV blocks of a model. ``pool`` is host memory, uint8 [num_blocks, num_layers, layer_bytes]."""

    @property
    def pool(self) -> Pool: ...

    @property
    def device_blocks(self) -> DevicePool | None:
        """The cache itself, where it lies on a GPU."""

    def fetch(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int | None = None) -> None:
        """Bring these layers of these blocks into ``pool``."""

    def store(self, blocks: Sequence[int]) -> None:
        """Bring these blocks of ``pool`` into the cache."""


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
    """Blocks on a GPU are read there by the movers ``ON_DEVICE``, and by the others from their mirror in host
    memory."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._on_device = blocks, blocks.device_blocks
        self._host_sums = RunningChecksums(blocks.pool)
        self._device_sums = None if self._on_device is None else DeviceChecksums(self._on_device.checksums)

    @property
    def num_layers(self) -> int:
        return int(self._blocks.pool.shape[1])

    @property
    def block_bytes(self) -> int:
        return int(self._blocks.pool[0].nbytes)

    def sums_on_device(self, mover: str) -> bool:
        return self._on_device is not None and mover in ON_DEVICE

    def fetch(self, mover: str, blocks: Sequence[int], first_layer: int, num_layers: int) -> None:
        if not self.sums_on_device(mover):
            self._blocks.fetch(blocks, first_layer, num_layers)

    def add_sent(self, mover: str, blocks: Sequence[int], first_layer: int, num_layers: int) -> None:
        self._sums(mover).add(blocks, first_layer, num_layers)

    def sent_checksums(self, mover: str, blocks: Sequence[int]) -> list[int]:
        return self._sums(mover).of(blocks)

    def checksums(self, mover: str, blocks: Sequence[int]) -> list[int]:
        if self._on_device is not None and mover in ON_DEVICE:
            return self._on_device.checksums(blocks)
        return checksums(self._blocks.pool, blocks)

    def store(self, mover: str, blocks: Sequence[int]) -> None:
        if not self.sums_on_device(mover):
            self._blocks.store(blocks)

    def _sums(self, mover: str) -> RunningChecksums | DeviceChecksums:
        return self._device_sums if self._device_sums is not None and mover in ON_DEVICE else self._host_sums


class LiveMover:
    """``plaintext``: whether KV blocks may leave unencrypted."""

    def __init__(self, blocks: Blocks, plaintext: bool) -> None:
        self._blocks, self._plaintext = blocks, plaintext

    def open(self, met: Met) -> PutSource:
        return open_source(met, self._blocks.pool, self._plaintext, self._blocks.device_blocks)


def live_environment(
    blocks: Blocks, key: ClusterKey | None, poller: zmq.Poller, plaintext: bool
) -> Environment:
    """What a worker of this process is given; its channels are registered with ``poller``."""
    return Environment(
        MonotonicClock(), LiveNetwork(key, poller), LiveDevice(blocks), LiveMover(blocks, plaintext)
    )
