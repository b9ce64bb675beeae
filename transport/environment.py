"""Everything outside that the shells of a worker may use: four protocols, and one value that holds an
implementation of each. And what the coordinator's dispatcher may use: timers and a control socket.

The live ones are in ``live_environment.py`` and ``channels/``. The fault simulator gives the same shells a
network, a device, movers and timers of its own, under virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from .messages.messages import Message, Met
from .movers.interface import PutSource


class Clock(Protocol):
    def now(self) -> float:
        """Seconds of this process's monotonic clock."""


class Timer(Protocol):
    def cancel(self) -> None:
        """Do not call it, if it has not been called."""


class Timers(Clock, Protocol):
    """The clock of an event loop, which makes one call after the other."""

    def call_soon(self, callback: Callable[..., object], *args: object) -> object:
        """Call once the call that is being made has returned, in the order of ``call_soon``."""

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> Timer:
        """Call after ``delay_s`` seconds, or later."""


class ControlSocket(Protocol):
    """The coordinator's end of all workers' channels; it knows each by the identity that the worker chose."""

    def reach(self, peer: bytes, *messages: Message) -> bool:
        """Queue messages for ``peer``; return whether it is connected."""

    def receive(self, limit: int) -> list[tuple[bytes, Message]]:
        """Return what has arrived, of up to ``limit`` calls of ``reach``, each with its sender's identity."""

    def lost_any(self) -> bool:
        """Return whether a connection has ended since the last call. Whose shows in ``reach``."""


class Channel(Protocol):
    """A connection to one listening peer. It reconnects by itself, for ever, and never blocks."""

    @property
    def socket(self) -> object:
        """Names this channel among those that are ready."""

    @property
    def ever_connected(self) -> bool: ...

    def gone_since(self, now: float) -> float | None:
        """When the connection was first found missing; None while it is there."""

    def send(self, *messages: Message) -> bool:
        """Queue messages, together; False where any had to be dropped."""

    def receive(self, limit: int) -> list[Message]:
        """What has arrived, of up to ``limit`` calls of ``send``."""


class Listener(Protocol):
    """The listening end of many channels; it knows each peer by the identity that the peer chose."""

    @property
    def socket(self) -> object:
        """Names this listener among those that are ready."""

    @property
    def address(self) -> str:
        """What it listens on."""

    def send(self, peer: bytes, *messages: Message) -> bool:
        """Queue messages for ``peer``; False where any had to be dropped."""

    def receive(self, limit: int) -> list[tuple[bytes, Message]]:
        """What has arrived, of up to ``limit`` calls of ``send``: messages, each with its sender's
        identity."""


class LocalProcess(Protocol):
    def alive(self) -> bool:
        """False once it has ended."""


class Network(Protocol):
    """Channels to peers and coordinators, and what is known of this host's processes."""

    @property
    def host(self) -> str:
        """Equal in two processes exactly if one can map the other's memory."""

    def connect(self, address: str, identity: bytes, allowed: Collection[type[Message]]) -> Channel:
        """Connect in the background. Raises AddressError for a malformed address."""

    def listen(self, address: str, allowed: Collection[type[Message]]) -> Listener:
        """Raises AddressError."""

    def ready(self) -> set[object]:
        """The ``socket`` of each channel and listener that has something to receive; does not wait."""

    def close(self, channel: Channel | Listener, linger_s: float = 0.0) -> None:
        """End a channel; messages that do not leave within ``linger_s`` seconds are lost."""

    def hand_over(self, channels: Sequence[Channel]) -> Network:
        """Another network of this process, to which these channels belong from now on."""

    def process(self, pid: int) -> LocalProcess | None:
        """The process of this host that has this id now; None where there is none. Raises OSError where that
        cannot be seen."""


class Device(Protocol):
    """The worker's KV blocks, where they are computed and movers read and write them, and their checksums."""

    @property
    def num_layers(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def sums_on_gpu(self) -> bool:
        """Whether a GPU computes the checksums: one call costs about the same for one block as for many."""

    def write_test_block(self, block: int, seed: Sequence[int]) -> None:
        """Fill this block with bytes that ``seed`` determines. Raises MoverError where their checksum there
        differs from that of the bytes."""

    def add_sent(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> None:
        """Add these layers to the checksums of blocks that are being sent: layer 0 begins one anew, the
        others follow in order."""

    def sent_checksums(self, blocks: Sequence[int]) -> list[int]:
        """Return the checksums of blocks all of whose layers have been added."""

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """Return the checksums of blocks as a mover has written them."""


class Mover(Protocol):
    def open(self, met: Met) -> PutSource:
        """A way to put blocks into the pool of the peer that answered ``met``. Raises MoverError."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a worker's shells are given."""

    clock: Clock
    network: Network
    device: Device
    mover: Mover
