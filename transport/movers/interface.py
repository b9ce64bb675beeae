"""The interface of every KV mover. A *put* takes some layers of a block into the same layers of a granted
block of the peer's pool.

Pools are uint8 arrays [num_blocks, num_layers, layer_bytes], the same on both sides except for the number of
blocks. Nothing here blocks; nothing is safe to use from two threads at once.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import MoverError, PeerEnded
from ..messages.messages import Message, PeerId

Pool: TypeAlias = NDArray[np.uint8]
Item: TypeAlias = tuple[int, int, int]
"""(position in the lease, own block, the peer's block)"""
Items: TypeAlias = Sequence[Item]
Arrival: TypeAlias = tuple[int, int]
"""(lease, position)"""
Span: TypeAlias = tuple[int, int]
"""[start, end) in the pool's bytes"""


ONE_SIDED_MOVERS = frozenset({"cuda_ipc", "shm", "nixl"})
SAME_HOST_MOVERS = frozenset({"cuda_ipc", "shm"})
TWO_GPU_MOVERS = frozenset({"nccl"})  # between GPUs, not between two workers on one
FALLBACK_MOVER = "tcp"
"""Works between any two workers; replaces a mover that fails."""
MADE_ANEW = frozenset({"nccl"})
"""Tried once more when they fail, by a new meeting: their connection may have broken by the fault of neither
worker."""


@dataclass(frozen=True, slots=True)
class MoverEndpoints:
    """The movers that a decode worker can be written through, best first, and their addresses. FALLBACK_MOVER
    is used too, once another has failed."""

    movers: tuple[str, ...]
    host: str
    shm_name: str = ""
    data_address: str = ""
    gpu: str = ""  # UUID of the one with the KV cache; empty: host memory


class PutTarget(Protocol):
    """The receiving side: one per decode worker and mover."""

    one_sided: bool
    """The writer writes our memory by itself: ``poll`` returns nothing, and closing a lease does not stop a
    stalled writer."""
    lingers: bool
    """A put may land after its writer's process, or its end of the mover, has ended, until the writer is shut
    out."""

    @property
    def fd(self) -> int | None:
        """Readable when ``poll`` would return an arrival; None for a one-sided mover."""

    def address(self, peer: PeerId) -> bytes | None:
        """Return what this peer's source needs beyond the other fields of ``Met``; None: not ready, the peer
        will ask again."""

    def shut_out(self, peer: PeerId) -> bool:
        """End the peer's writing, if that can be done from here. Once this returns True, no put of the peer
        lands any more, and its next one fails."""

    def open(self, lease: int, secret: bytes, targets: Mapping[int, int]) -> None:
        """From now on accept each layer of each position in ``targets`` once, into the own block that the
        position maps to."""

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        """Accept each layer of these positions once more: what came was corrupt."""

    def close(self, lease: int) -> None:
        """From now on a two-sided mover drops whatever comes for this lease."""

    def poll(self, limit: int) -> list[Arrival]:
        """Return up to ``limit`` blocks that now lie in the pool with all their layers, each once."""

    def close_all(self) -> None:
        """The end of this target."""


class PutSource(Protocol):
    """The sending side: one per prefill worker and decode worker."""

    def put(
        self, lease: int, secret: bytes, items: Items, first_layer: int = 0, num_layers: int | None = None
    ) -> None:
        """Starts sending ``num_layers`` layers of these blocks, from ``first_layer`` on (None: all from
        there). They must keep their content until ``poll`` has named them, or ``cancel``, or ``close``. A
        layer of a block is put once; see ``expect_again``. Raises MoverError where the peer is known to be
        gone or ``items`` name blocks, or the range layers, that do not exist."""

    def poll(self) -> list[Arrival]:
        """Keep the transfer going. Return what has left since the last call, an entry for each block of each
        put. Raises MoverError where the peer is gone."""

    def pending(self) -> int:
        """Blocks of puts that have not left yet. Call ``poll`` soon while there are any."""

    def writing(self, lease: int) -> bool:
        """Return whether puts of this lease may still be writing the peer's memory by themselves (one-sided
        movers that copy in the background). Until that has ended, no message may be sent that lets the peer
        read or reuse those blocks."""

    def cancel(self, lease: int) -> None:
        """Forget this lease: puts that have not left are dropped, or leave with the content that the block
        then has."""

    def close(self) -> Collection[int]:
        """End the connection; puts that have not left are lost. Return the leases under which a put may still
        land: their peer has to find out by itself when that is over."""


class TalkingSource(Protocol):
    """A PutSource that exchanges messages with its target, over the control channel."""

    def receive(self, message: Message) -> None:
        """Take one of BETWEEN_MOVERS; its content is checked."""

    def take_messages(self) -> list[Message]:
        """Return the messages to send since the last call, in order; after ``close``, the last ones."""


class TalkingTarget(Protocol):
    """A PutTarget that exchanges messages with its sources. ``fd`` is readable when there are any to send,
    too."""

    def receive(self, peer: PeerId, message: Message) -> None:
        """Take one of BETWEEN_MOVERS; its content is checked."""

    def take_messages(self) -> list[tuple[PeerId, Message]]:
        """Return the messages to send since the last call, in order."""


def as_talking_source(source: PutSource | None) -> TalkingSource | None:
    """Return the source, if it exchanges messages."""
    return cast(TalkingSource, source) if hasattr(source, "take_messages") else None


def as_talking_target(target: PutTarget) -> TalkingTarget | None:
    """Return the target, if it exchanges messages."""
    return cast(TalkingTarget, target) if hasattr(target, "take_messages") else None


def layer_slice(shape: Sequence[int], first_layer: int, num_layers: int | None) -> slice:
    """Return the layers that a put names. Raises MoverError where a pool of this shape has no such layers."""
    end = shape[1] if num_layers is None else first_layer + num_layers
    if not 0 <= first_layer < end <= shape[1]:
        raise MoverError(f"put of layers {first_layer} up to {end}; the pool's blocks have {shape[1]}")
    return slice(first_layer, end)


class OneSidedTarget:
    """A receiving side that has nothing to do: the writer writes, and Handoff follows."""

    one_sided = True
    lingers = False
    fd: int | None = None

    def address(self, peer: PeerId) -> bytes | None:
        return b""

    def shut_out(self, peer: PeerId) -> bool:
        """Do nothing: a process that has mapped the pool can write as long as it lives."""
        return False

    def open(self, lease: int, secret: bytes, targets: Mapping[int, int]) -> None:
        """Prepare nothing: the grant itself contains the writer's targets."""

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        """Prepare nothing."""

    def close(self, lease: int) -> None:
        """Do nothing: the writer cannot be stopped; see ``PutTarget.one_sided``."""

    def poll(self, limit: int) -> list[Arrival]:
        return []

    def close_all(self) -> None:
        """The pool's memory is its owner's."""


@dataclass(frozen=True, slots=True)
class BackgroundPut:
    """A put under way. ``handle``: the mover's own."""

    lease: int
    positions: list[int]
    handle: Any
    deadline: float

    @property
    def arrivals(self) -> list[Arrival]:
        return [(self.lease, position) for position in self.positions]


class BackgroundSource:
    """The sending side of a one-sided mover that copies in the background."""

    def __init__(self) -> None:
        self._puts: list[BackgroundPut] = []

    def _begin(self, lease: int, items: Items, handle: Any, seconds: float) -> None:
        """Note a put that has begun, and has to end within ``seconds``."""
        positions = [position for position, _, _ in items]
        self._puts.append(BackgroundPut(lease, positions, handle, time.monotonic() + seconds))

    def pending(self) -> int:
        return sum(len(put.positions) for put in self._puts)

    def writing(self, lease: int) -> bool:
        return any(put.lease == lease for put in self._puts)

    def cancel(self, lease: int) -> None:
        """Do nothing: a put under way cannot be called back; see ``writing``."""


class PeerProcess:
    """A decode worker's process on this host, whose pool is mapped here."""

    def __init__(self, pid: int) -> None:
        """Raises MoverError; PeerEnded where it has ended."""
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError as error:
            if isinstance(error, ProcessLookupError):
                raise PeerEnded("the decode worker's process has ended") from None
            raise MoverError(f"cannot map the KV pool of process {pid}: {error.strerror}") from None
        self._end = select.poll()
        self._end.register(self._descriptor, select.POLLIN)

    def check(self) -> None:
        """Raises PeerEnded once it has ended."""
        if self._end.poll(0):
            raise PeerEnded("the decode worker's process has ended")

    def close(self) -> None:
        os.close(self._descriptor)


class Run(NamedTuple):
    source: int
    target: int
    num_bytes: int


def runs(
    items: Items, layers: slice, shape: Sequence[int], num_target_blocks: int, source: int, target: int
) -> list[Run]:
    """Return the copies that put these layers from a pool of ``shape`` at address ``source`` into the peer's
    of ``num_target_blocks`` at ``target``. Blocks side by side in both are one run. Raises MoverError for
    blocks that do not exist."""
    num_blocks, num_layers, layer_bytes = shape
    block_bytes, offset = num_layers * layer_bytes, layers.start * layer_bytes
    length = (layers.stop - layers.start) * layer_bytes
    found: list[Run] = []
    for _, own, theirs in items:
        if not (0 <= own < num_blocks and 0 <= theirs < num_target_blocks):
            raise MoverError(
                f"put of block {own} into block {theirs}: pools of {num_blocks} and "
                f"{num_target_blocks} blocks"
            )
        run = Run(source + own * block_bytes + offset, target + theirs * block_bytes + offset, length)
        last = found[-1] if found else None
        if last is not None and (last.source + last.num_bytes, last.target + last.num_bytes) == run[:2]:
            found[-1] = Run(last.source, last.target, last.num_bytes + length)
        else:
            found.append(run)
    return found
